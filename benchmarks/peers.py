"""Time train_gpt2.py beside the training loops of build-nanogpt, nanoGPT and llm.c.

    python benchmarks/peers.py --build-nanogpt DIR --nanogpt DIR --llm-c DIR

DIR is a clone of https://github.com/karpathy/NAME; any of the three may be left out. This runs
copies of their own scripts, edited where there is no flag. All train GPT-2 124M from random weights
on the same tokens, Python's own source, with all speed-ups. benchmarks/README.md lists differences.

A machine's speed drifts, so the programs take turns, each in a fresh process, in an order that is
reversed each round. All are timed by this program's clock, from one printed step to the next. Peak
memory is what PyTorch allocated on the GPU.

For Linux and macOS. Results are written to a file in --out after each run.
"""

import os
import re
import runpy
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
import numpy as np

OURS = "train_gpt2.py"
MANY = 1_000_000  # steps that a run is asked for, so that it is ended before its last one
PEAK = "peak MiB"
STEP = re.compile(r"^(?:step|iter) +\d+.*?loss:? ([\d.]+).*?[\d.] ?ms\b")  # as all four print it
# A made-up question takes the place of HellaSwag, which build-nanogpt would download.
HELLASWAG = """import torch
def iterate_examples(split): return [None]
def render_example(example): return None, torch.zeros(4, 8).long(), torch.ones(4, 8), 0"""

# ---- What each program is to do: args has a value for each flag, and work is a folder ------------


def as_flags(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def ours(args: Namespace, work: Path) -> list:
    shutil.rmtree(work / OURS / "out", ignore_errors=True)
    flags = {"model": "gpt2", "seq_len": args.seq_len, "batch_tokens": args.batch_tokens}
    flags |= {"micro_batch_size": args.micro_batch_size, "compile": args.compile}
    flags |= {"muon": False, "steps": MANY, "log_every": 1}
    flags |= {"eval_every": 0, "eval_tokens": 0, "save_every": 0, "num_samples": 0}
    flags |= {"data_dir": work / "tokens", "out_dir": "out"}
    return [machine.TRAIN, *as_flags(flags), *args.flags.split()]


def build_nanogpt(args: Namespace, work: Path) -> list:
    """Change a copy of the script, which has no flags."""
    folder = work / "build-nanogpt"
    (folder / "hellaswag.py").write_text(HELLASWAG, encoding="utf-8")
    values = {"B": args.micro_batch_size, "T": args.seq_len}
    values |= {"total_batch_size": args.batch_tokens, "use_compile": args.compile}
    values |= {"max_steps": MANY, "val_loss_steps": 1, "data_root": str(work / "npy")}
    text = set_constants((folder / "train_gpt2.py").read_text(encoding="utf-8"), values)
    (folder / "changed.py").write_text(text, encoding="utf-8")
    return [folder / "changed.py"]


def set_constants(text: str, values: dict) -> str:
    """Return a script with other values for names that are each assigned on exactly one line."""
    for name, value in values.items():
        text, number = re.subn(rf"^([ \t]*{name} = ).+$", rf"\g<1>{value!r}", text, flags=re.M)
        if number != 1:
            why = f"{name} is assigned on {number} lines instead of 1: take another commit"
            raise ValueError(f"train_gpt2.py of --build-nanogpt: {why}")
    return text


def nanogpt(args: Namespace, work: Path) -> list:
    B, T = args.micro_batch_size, args.seq_len
    flags = {"dataset": work / "raw", "device": args.device, "compile": args.compile}
    flags |= {"batch_size": B, "block_size": T, "log_interval": 1}
    flags |= {"gradient_accumulation_steps": args.batch_tokens // (B * T)}
    flags |= {"max_iters": MANY, "lr_decay_iters": MANY, "eval_interval": MANY, "eval_iters": 1}
    return [work / "nanoGPT" / "train.py", *as_flags(flags)]


def llm_c(args: Namespace, work: Path) -> list:
    is_cuda = args.device == "cuda"
    flags = {"model": "d12", "device": args.device, "batch_size": args.micro_batch_size}
    flags |= {"sequence_length": args.seq_len, "total_batch_size": args.batch_tokens}
    flags |= {"compile": int(args.compile), "flash": 1, "tensorcores": int(is_cuda)}
    flags |= {"dtype": "bfloat16" if is_cuda else "float32"}
    flags |= {"num_iterations": MANY, "write_tensors": 0, "overfit_single_batch": 0}
    flags |= {"input_bin": work / "tokens/train_000000.bin"}
    return [work / "llm.c" / "train_gpt2.py", *as_flags(flags)]


PROGRAMS = {OURS: ours, "build-nanogpt": build_nanogpt, "nanoGPT": nanogpt, "llm.c": llm_c}
CLONES = [name for name in PROGRAMS if name != OURS]


def lay_out(args: Namespace, clones: dict[str, Path], work: Path):
    """Write a copy of each program into work, and the tokens in the layouts that they read."""
    for name in (OURS, "raw", "npy"):
        (work / name).mkdir()
    for name, clone in clones.items():
        (work / name).mkdir()
        for script in clone.glob("*.py"):
            shutil.copy(script, work / name)
        PROGRAMS[name](args, work)  # to fail now rather than later
    flags = {"data-dir": work / "tokens", "val-fraction": 0.1, "tokenizer": "gpt2"}
    program = [sys.executable, machine.REPO / "prepare_data.py", *as_flags(flags)]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    for split in ("train", "val"):
        # a shard is 1,024 bytes of header, then the tokens
        tokens = np.fromfile(work / f"tokens/{split}_000000.bin", "<u2", offset=1024)
        tokens.tofile(work / f"raw/{split}.bin")
        np.save(work / f"npy/{split}.npy", tokens)


def run_script(script: str, *flags: str):
    """Run a script in this process; at SIGUSR2 print its peak memory in MiB and end at once."""

    def end(*_):
        torch = sys.modules.get("torch")
        peak = torch.cuda.max_memory_allocated() if torch else 0  # 0 on a CPU
        os.write(1, f"\n{PEAK} {peak / 2**20}\n".encode())  # the signal may interrupt a print
        os._exit(0)

    signal.signal(signal.SIGUSR2, end)
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def run(name: str, args: Namespace, work: Path) -> dict:
    """Return a run's times, losses and peak memory. Raise ValueError if it fails."""
    program = [sys.executable, "-u", __file__, "--run", *PROGRAMS[name](args, work)]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(work / "compiled")}
    wanted = 1 + machine.WARM_UP + args.steps
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(program, cwd=work / name, env=env, errors="replace", **pipes) as process:
        try:
            steps, lines = read_run(process, wanted)
        finally:
            process.kill()
    if len(steps) < wanted or not lines[-1].startswith(PEAK):
        why = f"{lines[-1]:.300}" or "it ended before its last step, without a message"
        raise ValueError(f"{name}: {why}")
    times, losses = zip(*steps, strict=True)
    result = {"ms": [1000 * (b - a) for a, b in zip(times[:-1], times[1:], strict=True)]}
    result |= {"loss": losses, "peak_mib": float(lines[-1][len(PEAK) :])}
    print(f"{name}: {step_ms(result):,.0f} ms", file=sys.stderr, flush=True)
    return result


def read_run(process: subprocess.Popen, wanted: int) -> tuple[list, list[str]]:
    """Return time and loss of each step, and all lines; stop the program after the last step."""
    steps, lines = [], [""]
    for line in process.stdout:
        now = time.perf_counter()
        match = STEP.search(line)
        if match and len(steps) < wanted:
            steps.append((now, float(match[1])))
            if len(steps) == wanted:
                process.send_signal(signal.SIGUSR2)
        lines += line.strip().splitlines()  # none if it is empty
        if line.startswith(PEAK):
            break  # processes that compile may hold the pipe for longer
    return steps, lines


def step_ms(run: dict) -> float:
    """Return the median time of a step."""
    return median(run["ms"][machine.WARM_UP :])


def compare(args: Namespace, names: list[str], content: dict, work: Path):
    """Run the programs in turn, and save the content after each run. The first name is ours."""
    path = None
    for number in range(args.rounds):
        content["rounds"].append({})
        for name in names if number % 2 == 0 else reversed(names):
            content["rounds"][-1][name] = run(name, args, work)
            if not path:  # the first run was ours, and tells the environment
                start = machine.read_log(work / OURS / "out")[0]
                content["environment"] = machine.environment(start)
                path = machine.new_path(args.out, "peers", content["environment"]["device"], "gpt2")
            machine.save(path, content)


def rows(content: dict) -> list[dict[str, str]]:
    """Return the table: for each program a dict from column to text. Speeds are medians of the
    rounds, with the slowest and the fastest; ratios are medians, with each round's."""
    rounds, table = content["rounds"], []
    for name in rounds[0]:
        runs = [done[name] for done in rounds]
        speeds = [1000 * content["batch_tokens"] / step_ms(run) for run in runs]
        ratios = [step_ms(done[name]) / step_ms(done[OURS]) for done in rounds]
        row = {"program": f"{name} {content['flags']}" if name == OURS else name}
        row["tokens/s"] = f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        row[f"{OURS} is faster by"] = "" if name == OURS else f"{median(ratios):.2f} ({each})"
        peak = max(run["peak_mib"] for run in runs)
        row["MiB"] = f"{peak:,.0f}" if peak else ""
        row["loss"] = f"{runs[-1]['loss'][0]:.2f} to {runs[-1]['loss'][-1]:.2f}"
        table.append(row)
    return table


def measure(args: Namespace):
    clones = {name: vars(args)[name].resolve() for name in CLONES if vars(args)[name]}
    if not clones:
        raise ValueError("nothing to compare with: give --build-nanogpt, --nanogpt or --llm-c")
    commits = {
        name: machine.output("git", "-C", str(folder), "describe", "--always", "--dirty")
        for name, folder in clones.items()
    }
    names = ("device", "seq_len", "batch_tokens", "micro_batch_size", "steps", "compile", "flags")
    content = {"date": str(date.today()), "commits": commits, "rounds": []}
    content |= {name: vars(args)[name] for name in names}
    with TemporaryDirectory() as work:
        lay_out(args, clones, Path(work))
        compare(args, [OURS, *clones], content, Path(work))
    env = content["environment"]
    print(
        f"GPT-2 124M on {machine.describe(env)}: {args.batch_tokens:,} tokens a step in passes of"
        f" {args.micro_batch_size} x {args.seq_len}, compile {args.compile}, torch {env['torch']},"
        f" {content['date']}, commit {env['commit']}\n\n{machine.markdown(rows(content))}"
    )


def main() -> int:
    parser = machine.make_parser(__doc__)
    add = parser.add_argument
    for name in CLONES:
        flag = "--" + name.lower().replace(".", "-")
        add(flag, type=Path, dest=name, metavar="DIR", help=f"folder with a clone of {name}")
    add("--rounds", type=int, default=3, help="timed runs of each program (default: 3)")
    add("--steps", type=int, default=10, help="timed steps of a run (default: 10)")
    add("--micro-batch-size", type=int, help="sequences per pass (default: 16, CPU 4)")
    add("--seq-len", type=int, help="tokens per sequence (default: 1024, CPU 256)")
    add("--batch-tokens", type=int, help="tokens per step (default: 524288, CPU 1024)")
    add("--no-compile", action="store_false", dest="compile", help="compile none of them")
    add("--flags", default="", help="more flags of train_gpt2.py, as one word: --flags='--a --b'")
    add("--out", type=Path, default="out/peers", help="folder of the results (default: out/peers)")
    args = parser.parse_args()
    is_cuda = machine.num_gpus() > 0
    args.device = "cuda" if is_cuda else "cpu"
    args.micro_batch_size = args.micro_batch_size or (16 if is_cuda else 4)
    args.seq_len = args.seq_len or (1024 if is_cuda else 256)
    args.batch_tokens = args.batch_tokens or (524_288 if is_cuda else 1024)
    return machine.exit_code(measure, args)


if __name__ == "__main__":
    sys.exit(run_script(*sys.argv[2:]) if sys.argv[1:2] == ["--run"] else main())
