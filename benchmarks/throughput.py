"""Speed and peak memory of train_gpt2.py beside a plain loop over Hugging Face's GPT-2.

    python benchmarks/throughput.py                       # GPT-2 124M and nano, float32
    python benchmarks/throughput.py --only gpt2 --bf16    # under bfloat16 autocast, on both sides

A machine's speed drifts within minutes, so the two programs take turns: in each round both run once
and afresh, each in a process of its own, and the next round turns their order round. What carries
over to another machine is their ratio.

Both have the same shape, batch, precision and tokens. The plain loop is what one writes first:
GPT2LMHeadModel, torch.optim.AdamW and clip_grad_norm_ as they come, loss.item() in each step. Two
of the model's settings are not the default, and neither slows it down: no dropout, because
train_gpt2.py has none and the mathematics is to be the same, and no cache of keys and values, which
only sampling needs and which Hugging Face's own Trainer turns off.

For Linux and macOS. Writes results/throughput-<device>-<date>.json with the time of every step.
"""

import argparse
import importlib.metadata
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import machine

OURS, THEIRS = "train_gpt2.py", "Hugging Face"
LEFT_OUT = 2  # steps at the start of a process, in which memory and caches fill
NUM_STEPS = {"gpt2": 6, "nano": 40}  # timed steps of a round
VOCAB_SIZES = {"gpt2": 50257, "nano": 257}  # nano reads bytes
FLAGS = {  # gpt2: what a CPU does in seconds; nano: its recipe
    "gpt2": ["--seq-len=256", "--micro-batch-size=4", "--batch-tokens=1024"],
    "nano": [],
}
SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "micro_batch_size", "batch_tokens", "steps")

# --------------------------------------------------------------------------------------------------
# One run of either program in the folder work: values of each step


def run_ours(work: Path, model: str, args: Namespace) -> dict[str, list]:
    """Run train_gpt2.py, the first time on the corpus that it prepares itself. The order is the
    disk's, since the plain loop has no other."""
    shutil.rmtree(work / "out", ignore_errors=True)  # a checkpoint of GPT-2 124M is 1.5 GB
    flags = [f"--model={model}", *FLAGS[model], "--bf16" if args.bf16 else "--no-bf16",
             f"--steps={LEFT_OUT + (args.steps or NUM_STEPS[model])}", "--no-shuffle",
             "--no-muon", "--eval-tokens=1", "--eval-every=0", "--save-every=0",
             "--out-dir=out"]  # fmt: skip
    program = [sys.executable, machine.REPO / OURS]
    subprocess.run([*program, *flags], cwd=work, check=True, stdout=subprocess.DEVNULL)
    steps = [record for record in read_log(work) if "ms" in record]
    return {
        name: [s[name] for s in steps]
        for name in ("ms", "loss", "peak_mib", "matmul_share", "tflops")
    }


def read_log(work: Path) -> list[dict]:
    """The records of the last run of train_gpt2.py; the first holds its environment and flags."""
    return [json.loads(line) for line in (work / "out" / "log.jsonl").read_text().splitlines()]


def run_theirs(work: Path, *_) -> dict[str, list]:
    """Run the plain loop as the last run of train_gpt2.py was."""
    command = [sys.executable, __file__, "--baseline", work]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def plain_loop(work: Path) -> dict[str, list]:
    """Train Hugging Face's GPT-2 from random weights, on the tokens, and with the shape, the
    precision and the device, of the last run of train_gpt2.py."""
    import numpy as np  # not above: what the parent process holds would count as a child's peak
    import torch

    first = read_log(work)[0]
    flags, device = Namespace(**first["flags"]), torch.device(first["environment"]["device"])
    torch.manual_seed(flags.seed)
    torch.set_float32_matmul_precision("high" if flags.tf32 else "highest")
    model = hugging_face_gpt2(flags).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    [shard] = work.glob("data/stdlib-*/train_000000.bin")
    tokens = np.memmap(shard, "<u2", mode="r", offset=1024)  # bytes of its header
    T, per_step = flags.seq_len, flags.batch_tokens
    values = {"ms": [], "loss": [], "peak_mib": []}
    for step in range(flags.steps):
        start = time.perf_counter()
        rows = tokens[step * per_step : (step + 1) * per_step].astype(np.int64).reshape(-1, T)
        x = torch.from_numpy(rows).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=flags.bf16):
            loss = model(x, labels=x).loss  # the model shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values["loss"].append(loss.item())  # waits for the device
        values["ms"].append(1000 * (time.perf_counter() - start))
        values["peak_mib"].append(peak_mib(device))
    return values


def hugging_face_gpt2(flags: Namespace):
    from transformers import GPT2Config, GPT2LMHeadModel

    vocab_size = VOCAB_SIZES[flags.model]
    shape = {name: getattr(flags, name) for name in ("n_layer", "n_head", "n_embd")}
    shape |= {"n_positions": flags.seq_len, "vocab_size": vocab_size}
    ends = {"bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **shape, **ends, **dropout))


def peak_mib(device) -> float:
    """As train_gpt2.py counts: of the GPU, or of this process where it has no memory of its own."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# --------------------------------------------------------------------------------------------------
# Rounds


def measure(work: Path, model: str, args: Namespace) -> dict:
    """The rounds of a model, each the runs by program in the order in which they ran, and their
    summary. Milliseconds per step, nats per token, MiB and TFLOP/s."""
    programs, rounds = {OURS: run_ours, THEIRS: run_theirs}, []
    for number in range(1, args.rounds + 1):
        rounds.append({name: run(work, model, args) for name, run in programs.items()})
        programs = dict(reversed(programs.items()))
        took = ", ".join(f"{name} {timed(run, 'ms'):.0f} ms" for name, run in rounds[-1].items())
        print(f"{model}, round {number} of {args.rounds}: {took}", file=sys.stderr)
    first = read_log(work)[0]
    shape = {name: first["flags"][name] for name in SHAPE}
    summary = summarize(rounds, shape["batch_tokens"])
    return {"environment": first["environment"]} | shape | {"summary": summary, "rounds": rounds}


def timed(run: dict[str, list], name: str) -> float:
    """The median of a value over the steps that count."""
    return median(run[name][LEFT_OUT:])


def summarize(rounds: list[dict], batch_tokens: int) -> dict:
    """Medians over the rounds, and each round's own values; the largest peak."""
    speeds = {n: [1000 * batch_tokens / timed(r[n], "ms") for r in rounds] for n in (OURS, THEIRS)}
    return {
        "tokens_per_s": {name: median(values) for name, values in speeds.items()},
        "tokens_per_s_of_rounds": speeds,
        "ratio": median(speeds[OURS]) / median(speeds[THEIRS]),
        "ratio_of_rounds": [a / b for a, b in zip(*speeds.values(), strict=True)],
        "matmul_share": median(timed(r[OURS], "matmul_share") for r in rounds),
        "peak_mib": {name: max(r[name]["peak_mib"][-1] for r in rounds) for name in speeds},
    }


# --------------------------------------------------------------------------------------------------
# The report


def table(results: dict[str, dict]) -> str:
    """Markdown, a row for each program. The speeds are medians of the rounds, with the slowest and
    the fastest; "of matmul" is the share of the rate that this machine reaches in matrix products
    alone."""
    lines = ["| model | program | tokens/s | ratio | of matmul | peak MiB | loss |",
             "|---|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for model, result in results.items():
        summary, last = result["summary"], result["rounds"][-1]
        ratios = ", ".join(f"{ratio:.2f}" for ratio in summary["ratio_of_rounds"])
        share = f"{summary['matmul_share']:.0%}"
        more = {OURS: f"{summary['ratio']:.2f} ({ratios}) | {share}", THEIRS: "1 | "}
        for program, columns in more.items():
            speeds, loss = summary["tokens_per_s_of_rounds"][program], last[program]["loss"]
            speed = f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            tail = f"{summary['peak_mib'][program]:,.0f} | {loss[0]:.2f} to {loss[-1]:.2f}"
            lines.append(f"| {model} | {program} | {speed} | {columns} | {tail} |")
    return "\n".join(lines)


def block(contents: dict[str, dict]) -> str:
    """What benchmarks/README.md shows of these results, by file name."""
    rows = []
    for content in contents.values():
        for model, result in content["results"].items():
            summary = result["summary"]
            ours, theirs = (f"{summary['tokens_per_s'][n]:,.0f}" for n in (OURS, THEIRS))
            rows.append({
                "processor": machine.plain(content["environment"]["device_name"]),
                "model": {"gpt2": "124M"}.get(model, model), "precision": content["precision"],
                "tokens/s": ours, "plain loop": theirs, "ratio": f"{summary['ratio']:.2f}",
                "of matmul": f"{summary['matmul_share']:.0%}",
                "MiB": f"{summary['peak_mib'][OURS]:,.0f}",
            })  # fmt: skip
    return machine.markdown(rows)


def write(results: dict[str, dict], args: Namespace) -> Path:
    """Write the results, and return where; the next run of the same flags and day replaces them."""
    env = [machine.environment(result.pop("environment")) for result in results.values()][0]
    env["transformers"] = importlib.metadata.version("transformers")
    whole = {"date": str(date.today()), "precision": "bfloat16" if args.bf16 else "float32",
             "left_out_steps": LEFT_OUT, "environment": env, "results": results}  # fmt: skip
    more = args.only or "", "bf16" if args.bf16 else ""
    path = machine.results_path("throughput", env["device_name"], *more)
    machine.save(path, whole)
    return path


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=list(FLAGS), help="one of the models; none: both")
    add("--rounds", type=int, default=3, help="runs of each program (default: 3)")
    add("--steps", type=int, default=0, help="timed steps of a run (default 0: gpt2 6, nano 40)")
    add("--bf16", action="store_true", help="bfloat16 autocast (default: float32)")
    add("--readme", type=Path, nargs="+", metavar="JSON", help="show these in benchmarks/README.md")
    add("--baseline", type=Path, help=argparse.SUPPRESS)  # one plain loop, in this process
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 0:
        parser.error(f"--rounds {args.rounds} --steps {args.steps}: at least 1 and 0 (the default)")
    return args


def main() -> int:
    args = parse_args()
    if args.baseline:
        print(json.dumps(plain_loop(args.baseline)))
        return 0
    if args.readme:
        contents = {path.name: machine.load(path) for path in args.readme}
        machine.put_into_readme("throughput", block(contents))
        return 0
    try:
        importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        print(f"throughput.py: error: {error}: pip install transformers", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # ends the program that runs, too
    results = {}
    for model in [args.only] if args.only else FLAGS:
        with TemporaryDirectory() as work:
            try:
                results[model] = measure(Path(work), model, args)
            except subprocess.CalledProcessError as error:
                return error.returncode  # the program has said why
    path = write(results, args)
    print(f"{table(results)}\n\n{path.relative_to(machine.REPO)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
