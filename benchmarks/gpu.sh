#!/usr/bin/env bash
# Measure all that needs a GPU, in seven parts of at most ten minutes each, the most valuable first:
#   1  what the tests promise, on this GPU (tests/test_cuda.py), and the doctor's ten lines
#   2  the speed-ups with GPT-2 124M: losses, tokens per second, MFU, memory (ladder.py)
#   3  the loops of others beside this one, from the folders that are set (peers.py)
#   4  a run that was killed and resumed beside one that was not, bit for bit (resume.py)
#   5  124M for 1,000 steps with AdamW and with Muon, on Python's own source
#   6  gpt2 to gpt2-xl: what fits, and how fast it is (sizes.py)
#   7  the flags beyond the lecture (ladder.py)
#
#   benchmarks/gpu.sh                      # each part that is not done yet
#   benchmarks/gpu.sh --part 2             # this one
#   BUILD_NANOGPT=... NANOGPT=... LLM_C=... benchmarks/gpu.sh
#   TINY=1 benchmarks/gpu.sh               # nano's sizes, to try it without a GPU: three minutes
#
# A part that was cut off continues where it was, but for part 1, which begins again.
# Results go to benchmarks/results after each run, and into the tables of benchmarks/README.md; what
# was printed goes to out/gpu. All are copied to $OUT if it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python} here=out/gpu parts="1 2 3 4 5 6 7"
if [ "${1:-}" = --part ]; then
    parts=${2:?--part takes a number from 1 to 7}
    rm -f "$here/part-$parts.done"
fi
mkdir -p "$here"
if [ -n "${TINY:-}" ]; then
    ladder=(--model nano --steps 2) lecture=(bf16 fused) beyond=(muon)
    peers=(--small --steps 5 --rounds 1) sizes=(--only nano --steps 2)
    resume=(--model=nano --batch-tokens=2048 --eval-tokens=2048)
    long=(--model nano --steps 40 --eval-every 20 --eval-tokens 8192)
else
    ladder=(--model gpt2 --micro-batch-size 64 --steps 6)
    lecture=(tf32 bf16 compile flash pad-vocab fused bf16-residual accumulation)
    beyond=(tf32 bf16 flash pad-vocab fused muon recompute loss-chunk-tokens fp16)
    peers=(--micro-batch-size 64 --rounds 2) sizes=(--batch-tokens 131072) resume=()
    # With the lecture's batch, 1,000 steps would be 75 epochs of this corpus.
    long=(--model gpt2 --steps 1000 --batch-tokens 65536 --eval-every 100)
fi

part_1() {
    "$python" benchmarks/doctor.py && "$python" -m pytest tests/test_cuda.py -q --durations=10
}

part_2() {
    "$python" benchmarks/ladder.py "${ladder[@]}" --out benchmarks/results --resume \
        --only "${lecture[@]}"
}

part_3() {
    local folders=(${BUILD_NANOGPT:+--build-nanogpt "$BUILD_NANOGPT"})
    folders+=(${NANOGPT:+--nanogpt "$NANOGPT"} ${LLM_C:+--llm-c "$LLM_C"})
    if [ ${#folders[@]} = 0 ]; then
        echo "nothing to compare with: set BUILD_NANOGPT, NANOGPT or LLM_C to a clone's folder"
        return 0
    fi
    "$python" benchmarks/peers.py "${folders[@]}" "${peers[@]}" --resume
}

part_4() { "$python" benchmarks/resume.py --resume -- "${resume[@]}"; }

part_5() {
    local optimizer
    for optimizer in no-muon muon; do
        "$python" train_gpt2.py "${long[@]}" "--$optimizer" --resume --out-dir "$here/$optimizer" \
            || return
        mkdir -p "benchmarks/results/gpu-$optimizer"
        cp "$here/$optimizer/log.jsonl" "benchmarks/results/gpu-$optimizer"
    done
    "$python" benchmarks/plot.py "$here/no-muon" "$here/muon" --out benchmarks/results/gpu-muon.png
}

part_6() { "$python" benchmarks/sizes.py "${sizes[@]}" --resume; }

part_7() {
    "$python" benchmarks/ladder.py "${ladder[@]}" --out benchmarks/results --resume \
        --only "${beyond[@]}"
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
    "$python" benchmarks/tables.py || failed=1
    if [ -n "${OUT:-}" ]; then
        mkdir -p "$OUT" && cp -r benchmarks/results benchmarks/README.md "$here" "$OUT"
    fi
done
exit $failed
