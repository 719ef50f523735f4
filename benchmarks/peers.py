"""train_gpt2.py beside the training loops of build-nanogpt, nanoGPT and llm.c, on this machine.

    python benchmarks/peers.py --build-nanogpt DIR --nanogpt DIR --llm-c DIR
    python benchmarks/peers.py --nanogpt DIR --only small
    python benchmarks/peers.py --llm-c DIR --micro-batch-sizes 32 64 --rounds 2 --flags=--no-bf16
    python benchmarks/peers.py --readme benchmarks/results/peers-*.json

DIR is a clone of https://github.com/karpathy/NAME; any of the three may be left out. Their own
scripts run, from a copy in a temporary folder. What is no flag of theirs is changed there, by name;
HellaSwag, which would be downloaded, is one made-up question before the first step. All train from
random weights, on the same tokens of Python's own source, on one device.

    gpt2   GPT-2 124M: on a GPU 524,288 tokens per step at T 1024, on a CPU 1,024 at T 256
    small  on a CPU, the small network that nanoGPT's README has for one, beside nanoGPT alone

First each program is tried with several micro-batch sizes. On a GPU all speed-ups are on; on a CPU
torch.compile, and llm.c's flash and tensorcores, are tried both on and off, though nanoGPT's README
has compile off there, and train_gpt2.py by default. One setting is changed at a time, until no
change makes it faster. Then the programs take turns, each in a fresh process, in an order that each
round turns round, since a machine's speed drifts. train_gpt2.py has its other defaults, and what
--flags adds.

A step is timed from its printed line to the next one's, by the clock of this program: the same for
all, with all that a loop does in between. What they print themselves is kept beside it, as own_ms:
build-nanogpt's and llm.c's clocks cover data, passes and update, until the device is done;
nanoGPT's goes from the end of a step to the end of the next, and does not wait for the device;
train_gpt2.py's is of data, passes and update, in whole milliseconds. Peak memory is the GPU's as
PyTorch allocated it; on a CPU it is the process's, compilation included.

What is not equal, since it is part of what each program is:
  - On a CPU build-nanogpt always has bfloat16 autocast, train_gpt2.py where the hardware has
    bfloat16, nanoGPT and llm.c never: their dtype flags count on a GPU only, where all four have it
  - The embedding has 50,304 rows, llm.c's 50,257. In small the tokens are bytes, nanoGPT's has 257
    rows and train_gpt2.py's 320; with the characters of nanoGPT's README it would have 65
  - nanoGPT has no biases, and GELU in its exact form; learning rates and weight decay differ
  - nanoGPT draws sequences at random, build-nanogpt and llm.c read in order, train_gpt2.py deals
    out each once and checks CRCs: the losses show that a program learns, not how well
  - AdamW is fused in train_gpt2.py, in the others only on a GPU

For Linux and macOS. Writes results/peers-<device>-<date>[-only].json after each run of a round: the
time and the loss of every step, the trials, and the commits of the clones.
"""

import argparse
import json
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import machine
from ladder import BUSY, processor_ticks

OURS = "train_gpt2.py"
CLONES = {  # files that no clone of another one has all of
    "build-nanogpt": ("train_gpt2.py", "fineweb.py"),
    "nanoGPT": ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"),
    "llm.c": ("train_gpt2.py", "train_gpt2.c"),
}
LEFT_OUT = 3  # times at the start of a process, in which memory and caches fill
MANY = 1_000_000  # steps that a run is asked for, so that none does what it does after its last
NUM_STEPS = {"gpt2": 10, "small": 200}  # timed in a run
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128}
PEAK = "peak MiB"
# A step's loss and milliseconds, as each of the four prints them
STEP = re.compile(r"^(?:step|iter) +\d+.*?loss:? ([\d.]+).*?([\d.]+) ?ms\b")
HELLASWAG = """import torch
def iterate_examples(split): return [None]
def render_example(example): return None, torch.zeros(4, 8).long(), torch.ones(4, 8), 0"""

# --------------------------------------------------------------------------------------------------
# What each program is to do


@dataclass(frozen=True)
class Setting:
    """What all programs are to do, and the folder that holds a folder for each."""

    model: str  # "gpt2" or "small"
    device: str  # "cuda" or "cpu"
    seq_len: int
    batch_tokens: int
    micro_batch_sizes: list[int]
    steps: int  # timed in a run
    flags: list[str]  # more of train_gpt2.py
    work: Path


def spelled(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def ours(setting: Setting, folder: Path, variant: dict) -> list:
    shutil.rmtree(folder / "out", ignore_errors=True)
    shape = {"model": "nano"} | SMALL if setting.model == "small" else {"model": "gpt2"}
    flags = {"seq_len": setting.seq_len, "batch_tokens": setting.batch_tokens, "steps": MANY,
             "eval_every": 0, "eval_tokens": 1, "save_every": 0, "muon": False,
             "data_dir": setting.work / "tokens", "out_dir": "out",
             **variant, "compile": bool(variant["compile"])}  # fmt: skip
    return [machine.REPO / OURS, *spelled(shape | flags), *setting.flags]


def build_nanogpt(setting: Setting, folder: Path, variant: dict) -> list:
    """Changes a copy of the script, which has no flags."""
    (folder / "hellaswag.py").write_text(HELLASWAG, encoding="utf-8")
    values = {"B": variant["B"], "use_compile": bool(variant["use_compile"]), "max_steps": MANY,
              "T": setting.seq_len, "total_batch_size": setting.batch_tokens, "val_loss_steps": 1,
              "data_root": str(setting.work / "npy")}  # fmt: skip
    text = set_constants((folder / "train_gpt2.py").read_text(encoding="utf-8"), values)
    (folder / "changed.py").write_text(text, encoding="utf-8")
    return [folder / "changed.py"]


def set_constants(text: str, values: dict) -> str:
    """A script with other values assigned to these names; ValueError unless each is assigned on
    exactly one line."""
    for name, value in values.items():
        found = list(re.finditer(rf"^([ \t]*{name} = ).+$", text, re.M))
        if len(found) != 1:
            why = f"{name} is assigned on {len(found)} lines instead of 1: take another commit"
            raise ValueError(f"train_gpt2.py of --build-nanogpt: {why}")
        text = text[: found[0].end(1)] + repr(value) + text[found[0].end() :]
    return text


def nanogpt(setting: Setting, folder: Path, variant: dict) -> list:
    num_micro = setting.batch_tokens // (setting.seq_len * variant["batch_size"])
    flags = {"dataset": setting.work / "raw", "device": setting.device, "log_interval": 1,
             "block_size": setting.seq_len, "gradient_accumulation_steps": num_micro,
             "max_iters": MANY, "lr_decay_iters": MANY, "eval_interval": MANY, "eval_iters": 1,
             **variant, "compile": bool(variant["compile"])}  # fmt: skip
    if setting.model == "gpt2":
        return [folder / "train.py", *spelled(flags)]
    flags |= SMALL | {"dropout": 0.0}
    return [folder / "train.py", "config/train_shakespeare_char.py", *spelled(flags)]


def llm_c(setting: Setting, folder: Path, variant: dict) -> list:
    flags = {"model": "d12", "device": setting.device, "num_iterations": MANY, "write_tensors": 0,
             "sequence_length": setting.seq_len, "total_batch_size": setting.batch_tokens,
             "input_bin": setting.work / "tokens/train_000000.bin", "overfit_single_batch": 0,
             "dtype": "bfloat16" if setting.device == "cuda" else "float32"}  # fmt: skip
    return [folder / "train_gpt2.py", *spelled(variant | flags)]


PROGRAMS = {  # the command, the micro-batch size's name, and those of speed-ups that can be off
    OURS: (ours, "micro_batch_size", ("compile",)),
    "build-nanogpt": (build_nanogpt, "B", ("use_compile",)),
    "nanoGPT": (nanogpt, "batch_size", ("compile",)),
    "llm.c": (llm_c, "batch_size", ("compile", "flash", "tensorcores")),
}


def lay_out(setting: Setting, clones: dict[str, Path]):
    """Write a folder for each program, with a copy of its scripts, and the tokens in three layouts:
    prepare_data.py's own, which llm.c reads too, nanoGPT's raw ones, and build-nanogpt's npy."""
    import numpy as np  # not above, where it would be in each process that is measured

    for name in (OURS, "raw", "npy"):
        (setting.work / name).mkdir(parents=True)
    for name, clone in clones.items():
        shutil.copytree(clone, setting.work / name, ignore=no_scripts)
        variant = {knob: values[0] for knob, values in knobs(name, setting).items()}
        PROGRAMS[name][0](setting, setting.work / name, variant)  # raises what it would later
    flags = {"data-dir": setting.work / "tokens", "val-fraction": 0.1,
             "tokenizer": "bytes" if setting.model == "small" else "gpt2"}  # fmt: skip
    program = [sys.executable, machine.REPO / "prepare_data.py", *spelled(flags)]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    for split in ("train", "val"):
        # behind the 1,024 bytes of its header
        tokens = np.fromfile(setting.work / f"tokens/{split}_000000.bin", "<u2", offset=1024)
        tokens.tofile(setting.work / f"raw/{split}.bin")
        np.save(setting.work / f"npy/{split}.npy", tokens)
    if setting.model == "small":
        (setting.work / "raw/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257}))


def no_scripts(folder: str, names: list[str]) -> list[str]:
    """What copytree leaves out: all but Python and nanoGPT's folder of it."""
    return [name for name in names if not name.endswith(".py") and name != "config"]


# --------------------------------------------------------------------------------------------------
# One run


def run_measured(script: str, *flags: str):
    """Run a script as python does, in this process. At SIGUSR2, which none of them uses, it prints
    its peak memory in MiB and ends at once, without what it does at its end."""

    def end(*_):
        torch, unit = sys.modules.get("torch"), 1 if sys.platform == "darwin" else 1024  # bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if torch and torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        os.write(1, f"\n{PEAK} {peak / 2**20}\n".encode())  # print may be what it interrupts
        os._exit(0)

    signal.signal(signal.SIGUSR2, end)
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def run(name: str, setting: Setting, variant: dict) -> dict:
    """A run's variant, and its times, losses, peak memory and what others used of the machine in
    that time; or why it has none."""
    command, folder = PROGRAMS[name][0], setting.work / name
    program = [sys.executable, "-u", __file__, "--run", *command(setting, folder, variant)]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(setting.work / "compiled")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begin, wanted = time.perf_counter(), 1 + LEFT_OUT + setting.steps
    with subprocess.Popen(program, cwd=folder, env=env, errors="replace", **pipes) as process:
        try:
            steps, used, said = read_run(process, wanted)
        finally:
            process.kill()
    if len(steps) < wanted or not said[-1].startswith(PEAK):
        return {"variant": variant, "why": reason(said)}
    times, losses, own_ms = zip(*steps, strict=True)
    ms = [1000 * (b - a) for a, b in zip(times[:-1], times[1:], strict=True)]
    total, idle, own = (b - a for a, b in zip(*used, strict=True))
    busy = (total - idle - own) / max(total, 1)
    text = f"{typed(name, variant)}: {median(ms[LEFT_OUT:]):,.0f} ms{note(busy)}"
    print(f"{setting.model}, {text}", file=sys.stderr)
    return {"variant": variant, "start_s": times[0] - begin, "ms": ms, "own_ms": own_ms,
            "loss": losses, "peak_mib": float(said[-1][len(PEAK) :]), "busy": busy}  # fmt: skip


def read_run(process: subprocess.Popen, wanted: int) -> tuple[list, list, list[str]]:
    """When each step's line came, its loss and its milliseconds; the ticks before and after those
    that count; all other lines. Ends the process after the last step."""
    steps, used, said = [], [], [""]
    for line in process.stdout:
        now, found = time.perf_counter(), STEP.search(line)
        if found and len(steps) < wanted:
            steps.append((now, float(found[1]), float(found[2])))
            if len(steps) in (1 + LEFT_OUT, wanted):
                used.append(ticks(process.pid))
            if len(steps) == wanted:
                process.send_signal(signal.SIGUSR2)
        said += line.strip().splitlines()  # none if it is empty
        if line.startswith(PEAK):
            break  # processes that compile may hold the pipe for longer
    return steps, used, said


def ticks(pid: int) -> tuple[int, int, int]:
    """Of the machine all and the idle ones, and those of a process; zeros on a Mac."""
    total, idle = processor_ticks()
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() if total else [0] * 13
    return total, idle, int(stat[11]) + int(stat[12])  # in user and in kernel mode


def reason(said: list[str]) -> str:
    """The last line of a program that failed, and the cure of the likeliest mistake."""
    missing = re.search(r"No module named '([\w.]+)'", said[-1])
    cure = f": pip install {missing[1]}" if missing else ""
    return f"{said[-1]:.300}{cure}" or "it ended before its last step, without a word"


def note(busy: float) -> str:
    return f"; others used {busy:.0%} of the machine" if busy > BUSY else ""


def typed(name: str, variant: dict) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in variant.items())])


# --------------------------------------------------------------------------------------------------
# All runs


def knobs(name: str, setting: Setting) -> dict[str, list]:
    """What is tried of a program's settings."""
    _, size, speed_ups = PROGRAMS[name]
    on_off = [1] if setting.device == "cuda" else [1, 0]
    return {size: setting.micro_batch_sizes} | dict.fromkeys(speed_ups, on_off)


def fastest(knobs: dict[str, list], time_of: Callable[[dict], float]) -> dict:
    """The variant that takes the least time, found by changing one knob at a time until none helps;
    where there is one variant only, that one, not timed."""
    best, before = {name: values[0] for name, values in knobs.items()}, None
    while best != before and any(len(values) > 1 for values in knobs.values()):
        before = best
        for name, values in knobs.items():
            best = min((best | {name: value} for value in values), key=time_of)
    return best


def choose(name: str, setting: Setting, trials: dict[str, dict]) -> dict:
    """A program's fastest variant; each is tried once."""

    def time_of(variant: dict) -> float:
        key = typed(name, variant)
        trials[key] = trials.get(key) or run(name, setting, variant)
        return step_ms(trials[key])

    return fastest(knobs(name, setting), time_of)


def step_ms(run: dict) -> float:
    """The median of the times that count; infinite if the run failed."""
    return median(run["ms"][LEFT_OUT:]) if "ms" in run else float("inf")


def compare(setting: Setting, names: list[str], rounds: int, content: dict):
    """Fill content with the trials of each program, and with the rounds: each the runs by program,
    in the order in which they ran, kept as they come. ValueError if one does not run."""
    result = {k: v for k, v in vars(setting).items() if k != "work"} | {"trials": {}, "rounds": []}
    content["results"][setting.model] = result
    variants = {name: choose(name, setting, result["trials"]) for name in names}
    for _ in range(rounds):
        result["rounds"].append({})
        for name in names:
            result["rounds"][-1][name] = done = run(name, setting, variants[name])
            if "why" in done:
                raise ValueError(f"{typed(name, variants[name])}: {done['why']}")
            save(content, setting)
        names = names[::-1]
    result["summary"] = summarize(result["rounds"], setting.batch_tokens)


def summarize(rounds: list[dict], batch_tokens: int) -> dict:
    """By program, each round's values. A ratio is the speed of train_gpt2.py over the other's."""
    speeds = {n: [1000 * batch_tokens / step_ms(r[n]) for r in rounds] for n in rounds[0]}
    ratios = {n: [a / b for a, b in zip(speeds[OURS], speeds[n], strict=True)] for n in speeds}
    peaks, busy = ({n: max(r[n][k] for r in rounds) for n in speeds} for k in ("peak_mib", "busy"))
    return {"tokens_per_s": speeds, "ratio": ratios, "peak_mib": peaks, "busy": busy}


def save(content: dict, setting: Setting) -> Path:
    """Write what there is so far; the next comparison of the same day and --only replaces it."""
    if "environment" not in content:
        log = (setting.work / OURS / "out/log.jsonl").read_text(encoding="utf-8")
        content["environment"] = machine.environment(json.loads(log.split("\n")[0])["environment"])
    device_name = content["environment"]["device_name"]
    path = machine.results_path("peers", device_name, content["only"] or "")
    machine.save(path, content)
    return path


def table(results: dict[str, dict]) -> str:
    """Markdown, a row for each program. The speeds are medians of the rounds, with the slowest and
    the fastest, the ratios medians with each round's."""
    lines = ["| model | program | tokens/s | train_gpt2.py is faster by | peak MiB | loss |",
             "|---|---|--:|--:|--:|--:|"]  # fmt: skip
    for model, result in results.items():
        summary, last = result["summary"], result["rounds"][-1]
        for name, speeds in summary["tokens_per_s"].items():
            ratios, busy = summary["ratio"][name], note(summary["busy"][name])
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            cells = [model, typed(name, last[name]["variant"]),
                     f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}{busy})",
                     "" if name == OURS else f"{median(ratios):.2f} ({each})",
                     f"{summary['peak_mib'][name]:,.0f}",
                     f"{last[name]['loss'][0]:.2f} to {last[name]['loss'][-1]:.2f}"]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def block(contents: dict[str, dict]) -> str:
    """What benchmarks/README.md shows of these results, by file name."""
    parts = []
    for name, content in contents.items():
        env = content["environment"]
        where = f"{machine.plain(env['device_name'])}, {env['cores']} cores"
        for model, result in content["results"].items():
            shape = f"{result['batch_tokens']:,} tokens a step, sequences of {result['seq_len']}"
            when = f"{content['date']}, commit {env['commit'][:7]}"
            parts.append(f"**{model} on {where}**: {shape}, {when} ([figures](results/{name})).")
            parts.append(table({model: result}))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    for name in CLONES:
        flag = "--" + name.lower().replace(".", "-")
        add(flag, type=Path, dest=name, metavar="DIR", help=f"folder with a clone of {name}")
    add("--only", choices=list(NUM_STEPS), help="one of the comparisons; none: what the device has")
    add("--rounds", type=int, default=3, help="timed runs of each program (default: 3)")
    add("--steps", type=int, help="timed steps of a run (default: gpt2 10, small 200)")
    add("--micro-batch-sizes", type=int, nargs="+", help="of gpt2 (default: powers of two)")
    add("--seq-len", type=int, help="of gpt2 (default: 1024, on a CPU 256)")
    add("--batch-tokens", type=int, help="of gpt2 (default: 524288, on a CPU 1024)")
    add("--flags", default="", help="more flags of train_gpt2.py, as one word: --flags='--a --b'")
    add("--readme", type=Path, nargs="+", metavar="JSON", help="show these in benchmarks/README.md")
    return parser.parse_args()


def find_clones(args: argparse.Namespace) -> dict[str, Path]:
    """The folders that were given; ValueError if there is none, or one is not what it should be."""
    clones = {name: vars(args)[name].resolve() for name in CLONES if vars(args)[name]}
    for name, folder in clones.items():
        if missing := [file for file in CLONES[name] if not (folder / file).is_file()]:
            cure = f"git clone https://github.com/karpathy/{name}"
            raise ValueError(f"{folder} is no clone of {name}, it has no {missing[0]}: {cure}")
    if not clones:
        raise ValueError("nothing to compare with: give --build-nanogpt, --nanogpt or --llm-c")
    return clones


def settings(args: argparse.Namespace, clones: dict[str, Path], work: Path) -> list[Setting]:
    """The comparisons to make; ValueError if they can't be made with these flags."""
    is_cuda = machine.num_gpus() > 0
    T = args.seq_len or (1024 if is_cuda else 256)
    batch_tokens = args.batch_tokens or (524_288 if is_cuda else 1024)
    usual = (16, 32, 64, 128) if is_cuda else (1, 2, 4, 8, 16)
    sizes = args.micro_batch_sizes or [b for b in usual if batch_tokens % (b * T) == 0] or usual
    if min(args.rounds, args.steps or 1, T, batch_tokens, *sizes) < 1:
        raise ValueError("rounds, steps and sizes must be at least 1")
    if wrong := [b for b in sizes if batch_tokens % (b * T)]:
        why = f"{batch_tokens} is no multiple of --micro-batch-sizes {wrong[0]} * --seq-len {T}"
        raise ValueError(f"--batch-tokens {why}: try --batch-tokens {wrong[0] * T}")
    shapes = {"gpt2": (T, batch_tokens, sizes), "small": (64, 768, [12])}
    if is_cuda or "nanoGPT" not in clones:
        del shapes["small"]
    if args.only not in (None, *shapes):
        raise ValueError("--only small needs --nanogpt, and a CPU: set CUDA_VISIBLE_DEVICES=")
    more, device = args.flags.split(), "cuda" if is_cuda else "cpu"
    return [Setting(name, device, *shape, args.steps or NUM_STEPS[name], more, work / name)
            for name, shape in shapes.items() if args.only in (None, name)]  # fmt: skip


def measure(args: argparse.Namespace):
    clones = find_clones(args)
    commit = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    commits = {n: machine.output("git", "-C", str(f), *commit) for n, f in clones.items()}
    content = {"date": time.strftime("%Y-%m-%d"), "only": args.only, "left_out": LEFT_OUT,
               "commits": commits, "results": {}}  # fmt: skip
    with TemporaryDirectory() as work:
        for setting in settings(args, clones, Path(work)):
            known = clones if setting.model == "gpt2" else {"nanoGPT": clones["nanoGPT"]}
            lay_out(setting, known)
            compare(setting, [OURS, *known], args.rounds, content)
            path = save(content, setting)
    print(f"{table(content['results'])}\n\n{path.relative_to(machine.REPO)}")


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the program that runs, too
    try:
        if args.readme:
            contents = {path.name: machine.load(path) for path in args.readme}
            machine.put_into_readme("peers", block(contents))
        else:
            measure(args)
    except subprocess.CalledProcessError as error:
        return error.returncode  # prepare_data.py has said why
    except (OSError, ValueError) as error:
        print(f"peers.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peers.py: stopped; the results hold the runs of the rounds so far", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run_measured(*sys.argv[2:]) if sys.argv[1:2] == ["--run"] else main())
