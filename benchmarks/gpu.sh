#!/usr/bin/env bash
# Measure everything that needs a GPU, in seven parts:
#   1  what the tests promise, on this GPU (tests/test_cuda.py)
#   2  the speed-ups with GPT-2 124M, one round: losses, tokens per second, memory (ladder.py)
#   3  build-nanogpt, nanoGPT and llm.c beside this program, from the folders that are set (peers.py)
#   4  a killed and resumed run beside an uninterrupted one, bit for bit (resume.py)
#   5  124M for 1,000 steps with AdamW, with Muon, and with AdamW and a float32 residual stream, on
#      Python's own source (plot.py)
#   6  gpt2 to gpt2-xl: what fits, and how fast it is (sweep.py)
#   7  part 2 in two rounds, with the flags beyond the lecture
#
#   benchmarks/gpu.sh                      # each part that is not done yet; 3 needs a folder
#   benchmarks/gpu.sh 2 4 6                # these, also if they are done
#   BUILD_NANOGPT=... NANOGPT=... LLM_C=... benchmarks/gpu.sh
#   TINY=1 benchmarks/gpu.sh               # nano's sizes, to try it without a GPU
#
# Parts 5 and 6 continue where they were interrupted; the others start over. Results go to
# benchmarks/results after each run, and printed output to out/gpu. If OUT is set, $OUT/gpu.tgz
# holds all of it, updated every 15 seconds, so that little is lost if the machine is taken away.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || echo python)} here=out/gpu results=benchmarks/results
peers_in=(${BUILD_NANOGPT:+--build-nanogpt "$BUILD_NANOGPT"})
peers_in+=(${NANOGPT:+--nanogpt "$NANOGPT"} ${LLM_C:+--llm-c "$LLM_C"})
parts="1 2 4 5 6 7"
[ ${#peers_in[@]} != 0 ] && parts="1 2 3 4 5 6 7"
mkdir -p "$here"
if [ $# != 0 ]; then
    parts=$*
    for part in $parts; do rm -f "$here/part-$part.done"; done
fi
# Kept, so that a part that goes on does not compile everything again.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/out/inductor}
if [ -z "${TINY:-}" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
then
    echo "error: PyTorch finds no GPU: to try this without one, TINY=1 benchmarks/gpu.sh" >&2
    exit 2
fi
if [ -n "${TINY:-}" ]; then
    results=out/gpu/results
    tiny=(--model nano --n-layer 1 --n-head 1 --n-embd 16 --seq-len 16 --batch-tokens 128 --no-bf16)
    tiny+=(--eval-tokens 256)
    ladder=(--model nano --micro-batch-size 2 --seq-len 16 --steps 2) lecture=(flash) beyond=(muon)
    peers=(--steps 1 --rounds 1 --micro-batch-size 1 --seq-len 16 --batch-tokens 16 --no-compile)
    resume=("${tiny[@]}") long=("${tiny[@]}" --steps 20 --eval-every 10)
    gpu=tiny sizes=("${tiny[@]}" --steps 5)
else
    # In float32 with plain attention, 64 sequences do not fit into 80 GB.
    ladder=(--model gpt2 --micro-batch-size 32 --steps 6)
    lecture=(tf32 bf16 compile flash pad-vocab fused bf16-residual accumulation)
    beyond=(muon recompute loss-chunk-tokens fp16)
    peers=(--micro-batch-size 32 --rounds 2) resume=()
    # With the lecture's batch, 1,000 steps would be 75 epochs of this corpus.
    long=(--model gpt2 --steps 1000 --batch-tokens 65536 --eval-every 100)
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs 'a-zA-Z0-9\n' -)
    sizes=(--model gpt2,gpt2-medium,gpt2-large,gpt2-xl --steps 7 --batch-tokens 131072 --no-muon)
fi

part_1() {
    "$python" -m torch.utils.collect_env
    # A warning of another version of a library is no reason to stop here.
    "$python" -m pytest tests/test_cuda.py -v -W default --durations=10
}

climb() { "$python" benchmarks/ladder.py "${ladder[@]}" --out "$results" "$@"; }

part_2() { climb --rounds 1 --only "${lecture[@]}"; }

part_3() { "$python" benchmarks/peers.py "${peers_in[@]}" "${peers[@]}" --out "$results"; }

part_4() {
    "$python" benchmarks/resume.py --out "$results" -- "${resume[@]}" || return
    "$python" benchmarks/resume.py --out "$results" -- "${resume[@]}" --deterministic
}

part_5() {
    train_long adamw --no-muon || return
    train_long muon --muon || return
    train_long float32-residual --no-muon --no-bf16-residual || return
    rm -f "$results/gpu-long.png"
    "$python" benchmarks/plot.py "$here/adamw" "$here/muon" "$here/float32-residual" \
        --out "$results/gpu-long.png"
}

train_long() { # name flags
    "$python" train_gpt2.py "${long[@]}" "${@:2}" --auto-resume --out-dir "$here/$1" || return
    keep_log "$here/$1" "gpu-$1"
}

keep_log() { # folder of a run, name
    mkdir -p "$results/$2" && cp "$1/log.jsonl" "$results/$2"
}

part_6() {
    local name=sizes-$gpu
    # --keep 1: a run wants room on the disk for all checkpoints that it may keep.
    "$python" benchmarks/sweep.py --name "$name" --discard -- "${sizes[@]}" --eval-tokens 0 \
        --num-samples 0 --save-every 0 --keep 1 ',--recompute --loss-chunk-tokens=1024'
    local code=$?
    for run in "out/sweep/$name"/*/; do
        [ -e "$run/log.jsonl" ] && keep_log "$run" "sweep-$name/$(basename "$run")"
    done
    return $code
}

part_7() { climb --only "${lecture[@]}" "${beyond[@]}"; }

bring() { # name of a temporary file
    # tar complains of files that grow meanwhile; what it has of them is good.
    tar czf "$OUT/$1" --exclude='step_*' benchmarks/results "$here"
    mv "$OUT/$1" "$OUT/gpu.tgz"
}

if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    while kill -0 $$ && sleep 15; do bring loop.tmp; done > "$here/bring.txt" 2>&1 &
    loop=$!
    trap 'kill $loop; wait $loop; bring last.tmp 2> "$here/bring.txt"' EXIT
fi
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
done
exit $failed
