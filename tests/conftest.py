"""What the tests share: a tiny data set, and runs of train_gpt2.py in processes of their own."""

import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import traceback
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are of the CPU, also beside a GPU

import numpy as np
import pytest
import torch

import dataloader
import prepare_data
import train_gpt2
from model import GPT, GPTConfig
from support.checkpoint import checkpoints, read_checkpoint

torch.backends.mps.is_available = lambda: False

TINY = {  # flags of a run of a second
    "model": "nano", "n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 16, "steps": 12,
    "micro_batch_size": 1, "batch_tokens": 192, "eval_tokens": 512, "eval_every": 0,
    "save_every": 5, "warmup_steps": 2, "learning_rate": 0.01, "bf16": False, "flash": True,
}  # fmt: skip


def matrix() -> dict[str, tuple[str, list[str]]]:
    """The rows of FAULTS.md: what is broken, and the tests that do it."""
    text = Path(__file__).with_name("FAULTS.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| F")]
    return {row: (broken, tests.split(", ")) for row, broken, tests in lines}


def pytest_terminal_summary(terminalreporter, config):
    """After the slow tests: each row of the fault matrix, and what came of it."""
    if config.getoption("markexpr") == "not slow":
        return
    outcomes = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            outcomes[report.nodeid.split("::")[-1].split("[")[0]][outcome] += 1
    terminalreporter.section("fault matrix")
    for row, (broken, tests) in matrix().items():
        total = sum((outcomes[name] for name in tests), Counter())
        found = ", ".join(f"{count} {outcome}" for outcome, count in total.items())
        terminalreporter.write_line(f"{row}  {found or 'in the default run':<18}  {broken}")


def flags(**changes) -> list[str]:
    """A command line: TINY with changes; None leaves a flag out."""
    values = TINY | changes
    line = []
    for name, value in values.items():
        if isinstance(value, bool):
            line.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        elif value is not None:
            line += [train_gpt2.spell(name), str(value)]
    return line


@pytest.fixture(autouse=True)
def no_source_is_remembered():
    """By a name that is another folder's in the next test."""
    train_gpt2.find_source.cache_clear()


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def make_data(folder: Path) -> Path:
    """Words without sense, as bytes, in shards of a prime length, so that nothing fits evenly."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(1, 6), np.uint8)) for _ in range(40)]
    texts = [b" ".join(rng.choice(words, 60)) for _ in range(12)]
    records = [json.dumps({"text": text.decode()}) + "\n" for text in texts]
    (folder / "text.jsonl").write_text("".join(records))
    line = ["--input", folder / "text.jsonl", "--data-dir", folder / "tokens"]
    args = prepare_data.parse_args([*map(str, line), "--val-fraction", "0.2", "--seed", "1"])
    args.shard_tokens = 1009  # fewer than the command line takes
    prepare_data.prepare(args)
    return folder / "tokens"


def questions(folder: Path, count: int = 20, token: int | None = None) -> Path:
    """Multiple-choice questions of words without sense, as bytes; token is put in as the last."""
    rng = np.random.default_rng(5)

    def text(most: int) -> str:
        return "".join(rng.choice([*" abcdefgh"], rng.integers(1, most))).strip() or "a"

    lines = [{"ctx": text(20), "endings": [text(9) for _ in range(4)], "label": int(label)}
             for label in rng.integers(0, 4, count)]  # fmt: skip
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare = ["--multiple-choice", str(folder / "questions.jsonl"), "--tokenizer", "bytes"]
    with redirect_stdout(io.StringIO()):
        assert prepare_data.main([*prepare, "--data-dir", str(folder / "asked")]) == 0
    path = folder / "asked" / "questions.bin"
    if token:
        path.write_bytes(path.read_bytes()[:-2] + token.to_bytes(2, "little"))
    return path


def write_shard(path: Path, tokens: np.ndarray):
    path.write_bytes(dataloader.shard_header(len(tokens)) + tokens.astype("<u2").tobytes())


def rank_main(argv: list[str], folder: Path, env: dict[str, str], kill_after: int | None, inject):
    """One rank, in its own process, with its output in folder. It kills itself after a step.
    inject, a function of a module, is called with the rank before and may break anything."""
    os.environ.update(env)
    os.chdir(folder)
    torch.set_num_threads(1)
    if inductor := sys.modules.get("torch._inductor.config"):
        inductor.cpp.use_decompose_tanh = True  # as main() sets it, before anything imports it
    name = f"rank{env.get('RANK', 0)}"
    sys.stdout, sys.stderr = (open(f"{name}.{end}", "w") for end in ("out", "err"))
    log_step = train_gpt2.log_step

    def log_and_die(run, *args):
        log_step(run, *args)
        if run.state.step == kill_after:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has one

    train_gpt2.log_step = log_and_die
    code = 1
    try:
        if inject:
            inject(int(env.get("RANK", 0)))
        code = train_gpt2.main(argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start_ranks(
    argv, folder: Path, ranks: int = 1, kill_after: int | None = None, inject=None
) -> list:
    """Processes that run train_gpt2.py as torchrun would start them, from a server that has
    imported all that they need once."""
    method = "forkserver" if os.name == "posix" else "spawn"
    context = multiprocessing.get_context(method)
    slow_imports = ["torch._dynamo", "torch._inductor", "matplotlib.figure"]  # a run's own
    context.set_forkserver_preload(["train_gpt2", *slow_imports])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        env = {} if ranks == 1 else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        process = context.Process(target=rank_main, args=(argv, folder, env, kill_after, inject))
        process.start()
        processes.append(process)
    return processes


def finish(processes: list, folder: Path) -> tuple[int, str, str]:
    """The exit code of rank 0, its output and its errors."""
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode is not None, "a rank hangs"
    out, err = (Path(folder, f"rank0.{end}").read_text() for end in ("out", "err"))
    if processes[0].exitcode == 0:
        assert not any(process.exitcode for process in processes)
    return processes[0].exitcode, out, err


def train(argv, folder: Path, ranks: int = 1, kill_after: int | None = None, inject=None):
    """A whole run: exit code, output, errors."""
    return finish(start_ranks(argv, folder, ranks, kill_after, inject), folder)


def records(out_dir: Path, name: str) -> dict[int, float]:
    """Step -> value of name in the log; after a resume the later one counts."""
    lines = (out_dir / "log.jsonl").read_text().splitlines()
    whole = [json.loads(line) for line in lines if re.fullmatch('{"time".*}', line)]
    return {line["step"]: line[name] for line in whole if name in line}


def state_of(step: int, **parts) -> dict:
    """What the checkpoint of a very small network holds, every number of it its step."""
    model = GPT(shape := GPTConfig(4, 2, 1, 1, 4, False))
    params = [p for group in model.decay_groups() for p in group]
    full = lambda tensor: torch.full_like(tensor, step, requires_grad=False)  # noqa: E731
    moments = [{"exp_avg": full(p), "exp_avg_sq": full(p)} for p in params]
    state = {
        "step": step, "position": step, "skipped": [], "val_losses": {},
        "model": {name: full(tensor) for name, tensor in model.state_dict().items()},
        "optimizer": {i: {"step": torch.tensor(float(step))} | m for i, m in enumerate(moments)},
        "scaler": {}, "identity": asdict(shape), "config": {"seed": 1}, "environment": {},
    }  # fmt: skip
    return state | parts


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint of a run."""
    return read_checkpoint(checkpoints(out_dir)[0])["model"]


def digest(out_dir: Path) -> str:
    """SHA-256 of the weights in the newest checkpoint of a run."""
    digest = hashlib.sha256()
    for name, tensor in weights(out_dir).items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
