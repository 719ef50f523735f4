"""Time train_gpt2.py beside the training loops of build-nanogpt, nanoGPT and llm.c.

    python benchmarks/peers.py --build-nanogpt DIR --nanogpt DIR --llm-c DIR
    python benchmarks/peers.py --nanogpt DIR --small
    python benchmarks/peers.py --llm-c DIR --micro-batch-size 32 --rounds 2 --flags=--no-bf16
    python benchmarks/peers.py --llm-c DIR --resume    # continue an interrupted comparison

DIR is a clone of https://github.com/karpathy/NAME; any of the three may be left out. Copies of
their own scripts run; what they have no flag for is changed in the copy. HellaSwag, which
build-nanogpt would download, is one made-up question. All train GPT-2 124M from random weights, on
the same tokens of Python's own source; with --small the network of nanoGPT's README for a CPU.

All speed-ups are on. On a CPU each program is tried with and without torch.compile first, and the
faster way counts. Then the programs take turns, each in a fresh process, in an order that is
reversed each round, because a machine's speed drifts. A step is timed from its printed line to the
next one's, by the clock of this program, so it is the same for all. Peak memory is what PyTorch
allocated on the GPU; on a CPU it is the process's. benchmarks/README.md lists what is not equal.

For Linux and macOS. Results go to benchmarks/results/peers-*.json after each run.
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
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import machine
from machine import WARM_UP

OURS = "train_gpt2.py"
CLONES = ("build-nanogpt", "nanoGPT", "llm.c")
MANY = 1_000_000  # steps that a run is asked for, so that it is ended before its last one
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128}
PEAK = "peak MiB"
STEP = re.compile(r"^(?:step|iter) +\d+.*?loss:? ([\d.]+).*?[\d.] ?ms\b")  # as all four print it
HELLASWAG = """import torch
def iterate_examples(split): return [None]
def render_example(example): return None, torch.zeros(4, 8).long(), torch.ones(4, 8), 0"""

# ---- What each program is to do


@dataclass(frozen=True)
class Setting:
    """What all programs are to do, and the folder that holds a folder for each."""

    is_small: bool
    device: str  # "cuda" or "cpu"
    seq_len: int
    batch_tokens: int
    micro_batch_size: int
    steps: int  # timed in a run
    flags: list[str]  # more of train_gpt2.py
    work: Path


def command(name: str, setting: Setting, compiled: bool) -> list:
    """Return the command line of a program."""
    makers = {OURS: ours, "build-nanogpt": build_nanogpt, "nanoGPT": nanogpt, "llm.c": llm_c}
    return makers[name](setting, setting.work / name, compiled)


def as_flags(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def ours(setting: Setting, folder: Path, compiled: bool) -> list:
    shutil.rmtree(folder / "out", ignore_errors=True)
    flags = {"seq_len": setting.seq_len, "batch_tokens": setting.batch_tokens}
    flags |= SMALL | {"model": "nano"} if setting.is_small else {"model": "gpt2"}
    flags |= {"micro_batch_size": setting.micro_batch_size, "compile": compiled, "muon": False}
    flags |= {"steps": MANY, "eval_every": 0, "eval_tokens": 0, "save_every": 0, "num_samples": 0}
    flags |= {"data_dir": setting.work / "tokens", "out_dir": "out", "log_every": 1}
    return [machine.TRAIN, *as_flags(flags), *setting.flags]


def build_nanogpt(setting: Setting, folder: Path, compiled: bool) -> list:
    """As the others, after changing a copy of the script, which has no flags."""
    (folder / "hellaswag.py").write_text(HELLASWAG, encoding="utf-8")
    values = {"B": setting.micro_batch_size, "T": setting.seq_len}
    values |= {"total_batch_size": setting.batch_tokens, "use_compile": compiled}
    values |= {"max_steps": MANY, "val_loss_steps": 1, "data_root": str(setting.work / "npy")}
    text = set_constants((folder / "train_gpt2.py").read_text(encoding="utf-8"), values)
    (folder / "changed.py").write_text(text, encoding="utf-8")
    return [folder / "changed.py"]


def set_constants(text: str, values: dict) -> str:
    """Return a script with other values for names that are each assigned on exactly one line."""
    for name, value in values.items():
        lines = list(re.finditer(rf"^([ \t]*{name} = ).+$", text, re.M))
        if len(lines) != 1:
            why = f"{name} is assigned on {len(lines)} lines instead of 1: take another commit"
            raise ValueError(f"train_gpt2.py of --build-nanogpt: {why}")
        text = text[: lines[0].end(1)] + repr(value) + text[lines[0].end() :]
    return text


def nanogpt(setting: Setting, folder: Path, compiled: bool) -> list:
    B, T = setting.micro_batch_size, setting.seq_len
    flags = {"dataset": setting.work / "raw", "device": setting.device, "compile": compiled}
    flags |= {"batch_size": B, "block_size": T, "log_interval": 1}
    flags |= {"gradient_accumulation_steps": setting.batch_tokens // (B * T)}
    flags |= {"max_iters": MANY, "lr_decay_iters": MANY, "eval_interval": MANY, "eval_iters": 1}
    if setting.is_small:
        flags |= SMALL | {"dropout": 0.0}
        return [folder / "train.py", "config/train_shakespeare_char.py", *as_flags(flags)]
    return [folder / "train.py", *as_flags(flags)]


def llm_c(setting: Setting, folder: Path, compiled: bool) -> list:
    is_cuda = setting.device == "cuda"
    flags = {"model": "d12", "device": setting.device, "batch_size": setting.micro_batch_size}
    flags |= {"sequence_length": setting.seq_len, "total_batch_size": setting.batch_tokens}
    flags |= {"compile": int(compiled), "flash": 1, "tensorcores": int(is_cuda)}
    flags |= {"dtype": "bfloat16" if is_cuda else "float32"}
    flags |= {"num_iterations": MANY, "write_tensors": 0, "overfit_single_batch": 0}
    flags |= {"input_bin": setting.work / "tokens/train_000000.bin"}
    return [folder / "train_gpt2.py", *as_flags(flags)]


def lay_out(setting: Setting, clones: dict[str, Path]):
    """Write a folder with a copy of each program, and the tokens in the layouts that they read."""
    import numpy as np  # not above, where it would be in each process that is measured

    for name in (OURS, "raw", "npy"):
        (setting.work / name).mkdir(parents=True)
    for name, clone in clones.items():
        for folder in (".", "config"):  # nanoGPT has scripts in both
            (setting.work / name / folder).mkdir(parents=True, exist_ok=True)
            for script in (clone / folder).glob("*.py"):
                shutil.copy(script, setting.work / name / folder)
        command(name, setting, compiled=True)  # raises now what it would raise later
    tokenizer = "bytes" if setting.is_small else "gpt2"
    flags = {"data-dir": setting.work / "tokens", "val-fraction": 0.1, "tokenizer": tokenizer}
    program = [sys.executable, machine.REPO / "prepare_data.py", *as_flags(flags)]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    for split in ("train", "val"):
        # a shard is 1,024 bytes of header, then the tokens
        tokens = np.fromfile(setting.work / f"tokens/{split}_000000.bin", "<u2", offset=1024)
        tokens.tofile(setting.work / f"raw/{split}.bin")
        np.save(setting.work / f"npy/{split}.npy", tokens)
    if setting.is_small:
        (setting.work / "raw/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257}))


# ---- One run


def run_script(script: str, *flags: str):
    """Run a script in this process; at SIGUSR2 print its peak memory in MiB and end at once."""

    def end(*_):
        unit = 1 if sys.platform == "darwin" else 1024  # bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        os.write(1, f"\n{PEAK} {peak / 2**20}\n".encode())  # the signal may interrupt a print
        os._exit(0)

    signal.signal(signal.SIGUSR2, end)
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def run(name: str, setting: Setting, compiled: bool) -> dict:
    """Return a run's times, losses and peak memory, or why it has none."""
    program = [sys.executable, "-u", __file__, "--run", *command(name, setting, compiled)]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(setting.work / "compiled")}
    result = {"variant": {"B": setting.micro_batch_size, "compile": int(compiled)}}
    wanted = 1 + WARM_UP + setting.steps
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    folder = setting.work / name
    with subprocess.Popen(program, cwd=folder, env=env, errors="replace", **pipes) as process:
        try:
            steps, lines = read_run(process, wanted)
        finally:
            process.kill()
    if len(steps) < wanted or not lines[-1].startswith(PEAK):
        return result | {"why": reason(lines)}
    times, losses = zip(*steps, strict=True)
    result["ms"] = [1000 * (b - a) for a, b in zip(times[:-1], times[1:], strict=True)]
    result |= {"loss": losses, "peak_mib": float(lines[-1][len(PEAK) :])}
    print(f"{label(name, result)}: {step_ms(result):,.0f} ms", file=sys.stderr)
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


def reason(lines: list[str]) -> str:
    """Return the last line of a program that failed, and the cure of the likeliest mistake."""
    missing = re.search(r"No module named '([\w.]+)'", lines[-1])
    cure = f": pip install {missing[1]}" if missing else ""
    return f"{lines[-1]:.300}{cure}" or "it ended before its last step, without a message"


def label(name: str, run: dict) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in run["variant"].items())])


def step_ms(run: dict) -> float:
    """Return the median time of a step, infinite if the run failed."""
    return median(run["ms"][WARM_UP:]) if "ms" in run else float("inf")


# ---- All runs


def start(setting: Setting, commits: dict[str, str], resume: bool) -> tuple[dict, Path | None]:
    """Return new results, or to resume, the newest unfinished ones of the same setting and commits;
    and their file, if there is one."""
    model = "small" if setting.is_small else "gpt2"
    wanted = {name: value for name, value in vars(setting).items() if name != "work"}
    paths = machine.RESULTS.glob("peers-*.json") if resume else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        result = content["results"].get(model, {})
        is_same = all(result.get(name) == value for name, value in wanted.items())
        if is_same and content["commits"] == commits and "summary" not in result:
            return content, path
    content = {"date": str(date.today()), "left_out": WARM_UP, "commits": commits}
    content["results"] = {model: wanted | {"trials": {}, "rounds": []}}
    return content, None


def save(setting: Setting, content: dict, path: Path | None) -> Path | None:
    """Write the results, and return their file, which is new if there is no path. Raise ValueError
    if the machine or this program is another one than before."""
    log = setting.work / OURS / "out/log.jsonl"
    if log.exists():  # in this process it may not have been our turn yet
        logged = json.loads(log.read_text(encoding="utf-8").split("\n")[0])["environment"]
        now = machine.environment(logged)
        keys = ("device_name", "driver", "torch", "commit", "changed")
        machine.check_same(content.setdefault("environment", now), now, *keys)
    if "environment" not in content:
        return None  # our first run failed, and so the device has no name yet
    if not path:
        [model] = content["results"]
        path = machine.results_path("peers", content["environment"]["device_name"], model)
        path = machine.unused_path(path)
    machine.save(path, content)
    return path


def compare(
    setting: Setting, names: list[str], num_rounds: int, content: dict, path: Path | None
) -> Path:
    """Fill content with what it lacks of each program's trials and of the rounds; return its
    file. The first name is ours."""
    [result] = content["results"].values()
    trials, rounds = result["trials"], result["rounds"]
    for name in names:
        if setting.device == "cpu" and name not in trials:
            trials[name] = [run(name, setting, compiled) for compiled in (True, False)]
            path = save(setting, content, path)
    for number in range(num_rounds):
        if number == len(rounds):
            rounds.append({})
        for name in names if number % 2 == 0 else reversed(names):
            if name in rounds[number]:
                continue
            is_compiled = True
            if name in trials:
                is_compiled = step_ms(trials[name][0]) < step_ms(trials[name][1])
            done = run(name, setting, is_compiled)
            if "why" in done:
                raise ValueError(f"{label(name, done)}: {done['why']}")
            rounds[number][name] = done
            path = save(setting, content, path)
    result["summary"] = summarize(rounds, setting.batch_tokens)
    return save(setting, content, path)


def summarize(rounds: list[dict], batch_tokens: int) -> dict:
    """Return each round's values by program. A ratio is our speed over the other's."""
    summary = {"tokens_per_s": {}, "ratio": {}, "peak_mib": {}}
    for name in rounds[0]:
        runs = [number[name] for number in rounds]
        summary["tokens_per_s"][name] = [1000 * batch_tokens / step_ms(run) for run in runs]
        summary["ratio"][name] = [step_ms(r[name]) / step_ms(r[OURS]) for r in rounds]
        summary["peak_mib"][name] = max(run["peak_mib"] for run in runs)
    return summary


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results, by file name. Speeds are medians of
    the rounds with the slowest and the fastest; ratios are medians with each round's."""
    parts = []
    for file, content in contents.items():
        env = content["environment"]
        where = f"{machine.short_name(env['device_name'])}, {env['cores']} cores"
        [(model, result)] = content["results"].items()
        if "summary" not in result:
            continue  # it was interrupted
        shape = f"{result['batch_tokens']:,} tokens a step, sequences of {result['seq_len']}"
        when = f"{content['date']}, commit {env['commit'][:7]}"
        parts.append(f"**{model} on {where}**: {shape}, {when} ([figures](results/{file})).")
        summary, table = result["summary"], []
        for name, speeds in summary["tokens_per_s"].items():
            run = result["rounds"][-1][name]
            spread = f"({min(speeds):,.0f} to {max(speeds):,.0f})"
            row = {"program": label(name, run), "tokens/s": f"{median(speeds):,.0f} {spread}"}
            ratios = summary["ratio"][name]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            ratio = "" if name == OURS else f"{median(ratios):.2f} ({each})"
            row |= {"train_gpt2.py is faster by": ratio}
            row |= {"peak MiB": f"{summary['peak_mib'][name]:,.0f}"}
            table.append(row | {"loss": f"{run['loss'][0]:.2f} to {run['loss'][-1]:.2f}"})
        parts.append(machine.markdown(table))
    return "\n\n".join(parts)


# ---- The program


def find_clones(args: argparse.Namespace) -> dict[str, Path]:
    """Return the folders that were given; ValueError if one is not what it should be."""
    clones = {name: vars(args)[name].resolve() for name in CLONES if vars(args)[name]}
    for name, folder in clones.items():
        script = folder / ("train.py" if name == "nanoGPT" else "train_gpt2.py")
        if not script.exists():
            raise ValueError(f"{script} is missing: git clone https://github.com/karpathy/{name}")
    if not clones:
        raise ValueError("nothing to compare with: give --build-nanogpt, --nanogpt or --llm-c")
    if args.small and (list(clones) != ["nanoGPT"] or machine.num_gpus()):
        raise ValueError("--small takes --nanogpt alone, and a CPU: set CUDA_VISIBLE_DEVICES=")
    return clones


def choose_setting(args: argparse.Namespace, work: Path) -> Setting:
    flags = args.flags.split()
    if args.small:
        return Setting(True, "cpu", 64, 768, 12, args.steps or 200, flags, work)
    is_cuda = machine.num_gpus() > 0
    T = args.seq_len or (1024 if is_cuda else 256)
    batch_tokens = args.batch_tokens or (524_288 if is_cuda else 1024)
    B = args.micro_batch_size or (16 if is_cuda else 4)
    if batch_tokens % (B * T):
        why = f"{batch_tokens} is no multiple of --micro-batch-size {B} * --seq-len {T}"
        raise ValueError(f"--batch-tokens {why}: try --batch-tokens {B * T}")
    device = "cuda" if is_cuda else "cpu"
    return Setting(False, device, T, batch_tokens, B, args.steps or 10, flags, work)


def measure(args: argparse.Namespace):
    clones = find_clones(args)
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    commits = {n: machine.output("git", "-C", str(f), *describe) for n, f in clones.items()}
    with TemporaryDirectory() as work:
        setting = choose_setting(args, Path(work))
        content, path = start(setting, commits, args.resume)
        lay_out(setting, clones)
        path = compare(setting, [OURS, *clones], args.rounds, content, path)
    print(f"{block({path.name: content})}\n\n{path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    for name in CLONES:
        flag = "--" + name.lower().replace(".", "-")
        add(flag, type=Path, dest=name, metavar="DIR", help=f"folder with a clone of {name}")
    add("--small", action="store_true", help="the small network of nanoGPT's README")
    add("--rounds", type=int, default=3, help="timed runs of each program (default: 3)")
    add("--steps", type=int, help="timed steps of a run (default: 10, with --small 200)")
    add("--micro-batch-size", type=int, help="default: 16, on a CPU 4")
    add("--seq-len", type=int, help="default: 1024, on a CPU 256")
    add("--batch-tokens", type=int, help="default: 524288, on a CPU 1024")
    add("--flags", default="", help="more flags of train_gpt2.py, as one word: --flags='--a --b'")
    add("--resume", action="store_true", help="continue the newest unfinished results")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the program that runs, too
    try:
        measure(args)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"peers.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peers.py: stopped; finished runs are kept: --resume continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run_script(*sys.argv[2:]) if sys.argv[1:2] == ["--run"] else main())
