#!/usr/bin/env bash
# All that is to be measured on a GPU, in five parts of at most ten minutes each:
#   1  what the tests promise, on this GPU (tests/test_cuda.py), and the doctor's ten lines
#   2  the ladder of speed-ups, with few steps; cut off, it goes on the next time
#   3  the loops of others beside this one, at 64 sequences a pass, from the folders that are given
#   4  the first steps of the reproduction, and their losses beside the published ones
#   5  what Muon costs a step, with the other flags beyond the lecture
#
#   benchmarks/gpu.sh                      # each part that is not done yet
#   benchmarks/gpu.sh --part 2             # this one
#   BUILD_NANOGPT=... NANOGPT=... LLM_C=... DATA=data/fineweb-edu benchmarks/gpu.sh
#   TINY=1 benchmarks/gpu.sh               # nano's sizes: whether it works, on a machine without GPU
#
# Figures go to benchmarks/results, what was printed to out/gpu. Both are copied to $OUT if it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python} here=out/gpu
parts="1 2 3 4 5"
if [ "${1:-}" = --part ]; then
    parts=${2:?--part takes a number from 1 to 5}
    rm -f "$here/part-$parts.done"
elif [ $# -gt 0 ]; then
    echo "gpu.sh: error: $1: there is only --part N" >&2
    exit 2
fi
mkdir -p "$here"
data=(${DATA:+--data-dir "$DATA"})
if [ -n "${TINY:-}" ]; then
    model=(--model nano) steps=5 peers=(--only small --steps 5 --rounds 1)
    beyond=(--only muon recompute) lecture=(--only bf16 flash fused)
    first=(--model nano --steps 40 --eval-every 10 --eval-tokens 8192)
else
    model=(--model gpt2 --micro-batch-size 64) steps=6
    peers=(--only gpt2 --micro-batch-sizes 64 --rounds 2)
    beyond=(--only tf32 bf16 flash pad-vocab fused)
    beyond+=(muon recompute loss-chunk-tokens bf16-residual fp16)
    lecture=(--skip muon recompute loss-chunk-tokens bf16-residual fp16)
    first=(--model gpt2 --steps 19073 --eval-every 50 --save-every 0)
fi

part_1() {
    "$python" benchmarks/doctor.py && "$python" -m pytest tests/test_cuda.py -q --durations=10
}

part_2() {
    "$python" benchmarks/ladder.py "${model[@]}" --steps "$steps" --resume --keep "${lecture[@]}" \
        "${data[@]}"
}

part_3() {
    local folders=()
    [ -n "${BUILD_NANOGPT:-}" ] && folders+=(--build-nanogpt "$BUILD_NANOGPT")
    [ -n "${NANOGPT:-}" ] && folders+=(--nanogpt "$NANOGPT")
    [ -n "${LLM_C:-}" ] && folders+=(--llm-c "$LLM_C")
    if [ ${#folders[@]} = 0 ]; then
        echo "no folders of others: set BUILD_NANOGPT, NANOGPT or LLM_C"
        return 0
    fi
    "$python" benchmarks/peers.py "${folders[@]}" "${peers[@]}"
}

part_4() {
    rm -rf "$here/first"
    # stopped after 200 steps of the run of 19,073, whose warm-up they are
    "$python" train_gpt2.py "${first[@]}" "${data[@]}" --resume --out-dir "$here/first" &
    local run=$! stop=${TINY:+20}
    while kill -0 $run 2>/dev/null; do
        sleep 2
        if grep -q "\"step\": ${stop:-200}," "$here/first/log.jsonl" 2>/dev/null; then
            kill -TERM $run 2>/dev/null  # once: a second one would not wait for the save
            break
        fi
    done
    wait $run
    local code=$?
    cp "$here/first/log.jsonl" benchmarks/results/first-steps.jsonl
    "$python" benchmarks/plot.py "$here/first" --against reference --out "$here/first.png" || true
    [ $code = 0 ] || [ $code = 3 ]
}

part_5() {
    "$python" benchmarks/ladder.py "${model[@]}" --steps "$steps" --resume --keep "${beyond[@]}" \
        "${data[@]}"
}

failed=0
for part in $parts; do
    [ -e "$here/part-$part.done" ] && continue
    echo "== part $part"
    if "part_$part" 2>&1 | tee "$here/part-$part.txt"; then
        touch "$here/part-$part.done"
    else
        echo "part $part is not done: $here/part-$part.txt" >&2
        failed=1
    fi
    if [ -n "${OUT:-}" ]; then
        mkdir -p "$OUT" && cp -r benchmarks/results "$here" "$OUT"
    fi
done
exit $failed
