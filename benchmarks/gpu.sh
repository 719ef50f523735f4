#!/usr/bin/env bash
# Measure all that needs a GPU, in five parts of at most ten minutes each:
#   1  what the tests promise, on this GPU (tests/test_cuda.py), and the doctor's ten lines
#   2  the ladder of speed-ups, with few steps; if it is cut off, it continues the next time
#   3  the loops of others beside this one, at 64 sequences a pass, from the folders that are set
#   4  the first 200 steps of the reproduction, and their losses beside the published ones
#   5  the flags beyond the lecture
#
#   benchmarks/gpu.sh                      # each part that is not done yet
#   benchmarks/gpu.sh --part 2             # this one
#   BUILD_NANOGPT=... NANOGPT=... LLM_C=... DATA=data/fineweb-edu benchmarks/gpu.sh
#   TINY=1 benchmarks/gpu.sh               # nano's sizes, to try it without a GPU
#
# Results go to benchmarks/results, what was printed to out/gpu. Both are copied to $OUT if it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python} here=out/gpu parts="1 2 3 4 5"
if [ "${1:-}" = --part ]; then
    parts=${2:?--part takes a number from 1 to 5}
    rm -f "$here/part-$parts.done"
fi
mkdir -p "$here"
data=(${DATA:+--data-dir "$DATA"})
if [ -n "${TINY:-}" ]; then
    size=(--model nano --steps 5) lecture=(bf16 flash fused) beyond=(muon recompute)
    peers=(--small --steps 5 --rounds 1) stop=20
    first=(--model nano --steps 40 --eval-every 10 --eval-tokens 8192)
else
    size=(--model gpt2 --micro-batch-size 64 --steps 6)
    lecture=(tf32 bf16 compile flash pad-vocab fused accumulation)
    beyond=(tf32 bf16 flash pad-vocab fused muon recompute loss-chunk-tokens bf16-residual fp16)
    peers=(--micro-batch-size 64 --rounds 2) stop=200
    first=(--model gpt2 --steps 19073 --eval-every 50 --save-every 0)
fi

ladder() {
    "$python" benchmarks/ladder.py "${size[@]}" --out benchmarks/results --resume \
        "${data[@]}" --only "$@"
}

part_1() {
    "$python" benchmarks/doctor.py && "$python" -m pytest tests/test_cuda.py -q --durations=10
}

part_2() { ladder "${lecture[@]}"; }

part_3() {
    local folders=(${BUILD_NANOGPT:+--build-nanogpt "$BUILD_NANOGPT"})
    folders+=(${NANOGPT:+--nanogpt "$NANOGPT"} ${LLM_C:+--llm-c "$LLM_C"})
    "$python" benchmarks/peers.py "${folders[@]}" "${peers[@]}"
}

part_4() {
    rm -rf "$here/first"
    "$python" train_gpt2.py "${first[@]}" "${data[@]}" --out-dir "$here/first" &
    local run=$!
    while kill -0 $run 2>/dev/null; do
        sleep 2
        if grep -q "\"step\": $stop," "$here/first/log.jsonl" 2>/dev/null; then
            kill -TERM $run 2>/dev/null  # once: a second signal would not wait for the save
            break
        fi
    done
    wait $run
    local code=$?
    cp "$here/first/log.jsonl" benchmarks/results/first-steps.jsonl
    "$python" benchmarks/plot.py "$here/first" --against reference --out "$here/first.png"
    [ $code = 0 ] || [ $code = 3 ]
}

part_5() { ladder "${beyond[@]}"; }

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
