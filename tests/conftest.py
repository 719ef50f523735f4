"""What the tests share: a tiny data set, and runs of train_gpt2.py in processes of their own."""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("GPUS_OF_TESTS", os.environ.get("CUDA_VISIBLE_DEVICES", ""))  # test_cuda.py
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all others are of the CPU, also beside a GPU
os.environ["OMP_NUM_THREADS"] = "1"  # several run at once

import numpy as np
import pytest
import torch
import torch._dynamo  # else the first optimizer does, and keeps its callers' frames and files
from filelock import FileLock
from safetensors.torch import load_file

import prepare_data
import train_gpt2
from support import checkpoint
from support.cli import spell
from support.tokenizer import gpt2_tokenizer

torch.backends.mps.is_available = lambda: False

TINY = {  # flags of a run of a second
    "model": "nano", "n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 16, "steps": 12,
    "micro_batch_size": 2, "batch_tokens": 192, "eval_tokens": 512, "eval_every": 0,
    "save_every": 5, "warmup_steps": 2, "learning_rate": 0.01, "bf16": False, "flash": True,
    "sample_tokens": 20,
}  # fmt: skip
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ... of pytest-xdist; none: alone
NEEDS_POSIX = pytest.mark.skipif(os.name != "posix", reason="needs links, pipes and fork")
NEEDS_GPT2 = pytest.mark.skipif(
    gpt2_tokenizer() is None, reason="TIKTOKEN_CACHE_DIR has no GPT-2 vocabulary"
)


def pytest_configure(config):
    """Before the workers start: matplotlib lists the fonts when it is first imported, which takes
    seconds and, if several do it at once, so long that it says so in the output of a run."""
    if config.getoption("numprocesses", None) and find_spec("matplotlib"):
        import matplotlib.font_manager  # noqa: F401


def flags(**changes) -> list[str]:
    """A command line: TINY with changes; None leaves a flag out."""
    values = TINY | changes
    line = []
    for name, value in values.items():
        if isinstance(value, bool):
            line.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        elif value is not None:
            line += [spell(name), str(value)]
    return line


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable:
    """once(name, make) is a folder that make has filled, the first time that a worker asks for it;
    the others wait, and take it as it is."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if WORKER else root

    def get(name: str, make: Callable) -> Path:
        folder = root / f"once-{name}"
        with FileLock(root / f"lock-{name}"):
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                (folder / "made").touch()
        return folder

    return get


@pytest.fixture(scope="session")
def data_dir(once) -> Path:
    return once("data", make_data) / "tokens"


@pytest.fixture(scope="session")
def whole(data_dir, once) -> dict[int, Path]:
    """Folders of uninterrupted runs by number of ranks, each made when it is first asked for."""

    class Runs(dict):
        def __missing__(self, ranks: int) -> Path:
            make = partial(run, data_dir=data_dir, ranks=ranks)
            self[ranks] = once(f"whole-{ranks}", make) / "run"
            return self[ranks]

    return Runs()


def make_data(folder: Path):
    """Words without sense, as bytes, in shards of a prime length, so that nothing fits evenly."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(1, 6), np.uint8)) for _ in range(40)]
    texts = [b" ".join(rng.choice(words, 60)) for _ in range(12)]
    source = jsonl(folder / "text.jsonl", *({"text": text.decode()} for text in texts))
    line = ["--input", source, "--val-fraction", 0.2, "--seed", 1, "--shard-tokens", 1009]
    assert prepare(folder / "tokens", *line) == 0


def questions(folder: Path, count: int = 20) -> Path:
    """Multiple-choice questions of words without sense, in HellaSwag's format."""
    rng = np.random.default_rng(5)

    def text(most: int) -> str:
        return "".join(rng.choice([*" abcdefgh"], rng.integers(1, most))).strip() or "a"

    records = []
    for label in rng.integers(0, 4, count):
        endings = [text(9) for _ in range(4)]
        records.append({"ctx": text(20), "endings": endings, "label": int(label)})
    return jsonl(folder / "questions.jsonl", *records)


def write_shard(path: Path, tokens: np.ndarray):
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, "<i4")
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def jsonl(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf8")
    return path


def prepare(folder: Path, *flags) -> int:
    """Run prepare_data.py with these flags, and bytes as tokens if they don't say otherwise."""
    line = ["--data-dir", str(folder), "--tokenizer", "bytes", *map(str, flags)]
    return prepare_data.main(line)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of 40 documents of up to 2 kB, written in no order."""
    (tmp_path / "texts").mkdir()
    for n in random.Random(0).sample(range(40), 40):
        (tmp_path / "texts" / f"{n:02}.txt").write_bytes(b"line %d\n" % n * (5 * n + 1))
    return tmp_path / "texts"


def rank_main(argv: list[str], folder: Path, env: dict[str, str], kill_after, inject, script: str):
    """One rank, in its own process, with its output in folder. It kills itself after a step.
    inject, a function of a module, is called with the rank before and may break anything."""
    os.environ.update(env)
    os.chdir(folder)
    torch.set_num_threads(1)
    name = f"rank{env.get('RANK', 0)}"
    sys.stdout, sys.stderr = (open(f"{name}.{end}", "w") for end in ("out", "err"))
    log_step = train_gpt2.log_step

    def log_and_die(run, *args):
        log_step(run, *args)
        if run.step == kill_after:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has one

    train_gpt2.log_step = log_and_die
    machine = train_gpt2.device.machine  # whose commit may change in between
    train_gpt2.device.machine = lambda world: machine(world) | {"commit": "a commit"}
    code = 1
    try:
        if inject:
            inject(int(env.get("RANK", 0)))
        code = importlib.import_module(script).main(argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def redirected(out: Path, function: Callable, *args):
    """Call a function. What this process writes goes into files of the folder out."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        setattr(sys, name, open(number, "w", closefd=False))
    function(*args)


def in_process(out: Path, function: Callable, *args) -> tuple[int, str, str]:
    """Call a function in a process of its own: exit code, output, errors."""
    process = server().Process(target=redirected, args=(out, function, *args))
    process.start()
    process.join()
    return process.exitcode, (out / "stdout").read_text(), (out / "stderr").read_text()


@lru_cache
def server():
    """What starts processes, where it can from one that has imported all that they need once."""
    if os.name != "posix":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    slow_imports = ["torch._dynamo", "torch._inductor", "matplotlib.figure"]  # a run's own
    context.set_forkserver_preload(["conftest", *slow_imports])
    with pytest.MonkeyPatch.context() as patch:  # up to Python 3.12 it knows no sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


PORTS = itertools.count(10_000 + 2000 * int(WORKER.strip("gw") or 0) + os.getpid() % 1000)


def free_port() -> int:
    """One that no other worker takes before rank 0 does: each has its own, below those that the
    system gives to whoever asks for any."""
    for port in PORTS:
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port


def start_ranks(
    argv, folder: Path, ranks: int = 1, kill_after=None, inject=None, script="train_gpt2"
) -> list:
    """Processes that run train_gpt2.py as torchrun would start them, or another script."""
    folder.mkdir(parents=True, exist_ok=True)
    port, processes = free_port(), []
    for rank in range(ranks):
        env = {} if ranks == 1 else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        process = server().Process(
            target=rank_main, args=(argv, folder, env, kill_after, inject, script)
        )
        process.start()
        processes.append(process)
    return processes


def finish(processes: list, folder: Path) -> tuple[int, str, str]:
    """The exit code of rank 0, its output and its errors."""
    for process in processes:
        process.join(timeout=300)
        assert process.exitcode is not None, "a rank hangs"
    out, err = (Path(folder, f"rank0.{end}").read_text() for end in ("out", "err"))
    if processes[0].exitcode == 0:
        assert not any(process.exitcode for process in processes)
    return processes[0].exitcode, out, err


def train(argv, folder: Path, ranks=1, kill_after=None, inject=None, script="train_gpt2"):
    """A whole run: exit code, output, errors."""
    return finish(start_ranks(argv, folder, ranks, kill_after, inject, script), folder)


def run(folder: Path, data_dir: Path, name: str = "run", ranks: int = 1, **changes) -> Path:
    """The folder of a run that must succeed."""
    code, _, err = train(flags(data_dir=data_dir, out_dir=name, **changes), folder, ranks)
    assert code == 0, err
    return folder / name


def records(out_dir: Path, name: str) -> dict[int, float]:
    """Step -> value of name in the log; after a resume the later one counts."""
    lines = (out_dir / "log.jsonl").read_text().splitlines()
    whole = [json.loads(line) for line in lines if re.fullmatch('{"time".*}', line)]
    return {line["step"]: line[name] for line in whole if name in line}


def losses(out_dir: Path) -> dict[int, float]:
    return records(out_dir, "loss")


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint of a run, as they are stored."""
    return load_file(checkpoint.checkpoints(out_dir)[0] / "model.safetensors")


def moments(out_dir: Path) -> dict[str, torch.Tensor]:
    """The tensors of Run.state() in the newest checkpoint of a run."""
    return load_file(checkpoint.checkpoints(out_dir)[0] / "training.safetensors")


def saved_state(out_dir: Path) -> dict:
    """Run.state() in the newest good checkpoint of a run."""
    return checkpoint.load_newest(out_dir)[1]


def digest(out_dir: Path) -> str:
    """SHA-256 of weights and optimizer state in the newest checkpoint of a run."""
    sha256 = hashlib.sha256()
    for name, tensor in {**weights(out_dir), **moments(out_dir)}.items():
        sha256.update(name.encode() + tensor.numpy().tobytes())
    return sha256.hexdigest()


# ---- Faults that are injected into a run, and what must come of it -------------------------------


@dataclass
class Trial:
    """A run in a folder of its own, on its own copy of the data, which something happens to."""

    folder: Path
    data: Path  # which stays as it is
    whole: dict[int, Path]  # the uninterrupted run, by the number of ranks

    def __post_init__(self):
        shutil.copytree(self.data, self.folder / "data")
        self.out_dir = self.folder / "run"
        self.log = self.out_dir / "log.jsonl"

    def command(self, *more: str, **changes) -> list[str]:
        """The same command begins a run and goes on with it."""
        values = {"data_dir": "data", "out_dir": "run", "auto_resume": True}
        return [*flags(**values | changes), *more]

    def train(self, ranks: int = 1, inject=None, kill_after=None, **changes):
        return train(self.command(**changes), self.folder, ranks, kill_after, inject)

    def ends(self, line: list[str], ranks: int, inject) -> tuple[list[int], list[str]]:
        """The exit code of each rank, and its errors."""
        processes = start_ranks(line, self.folder, ranks, inject=inject)
        for process in processes:
            process.join(100)
        errors = [(self.folder / f"rank{rank}.err").read_text() for rank in range(ranks)]
        return [process.exitcode for process in processes], errors

    def copy_whole(self, ranks: int = 1) -> Path:
        return shutil.copytree(self.whole[ranks], self.out_dir)

    def saved(self) -> list[int]:
        return [checkpoint.step_of(path) for path in checkpoint.checkpoints(self.out_dir)]

    def goes_on(self, ranks: int = 1, inject=None, **changes) -> tuple[str, str]:
        """Repeat the command: now it ends, and nothing shows what happened. Return what it said."""
        code, out, err = self.train(ranks, inject, data_dir=self.data, **changes)
        assert code == 0, err
        equal(self.out_dir, self.whole[ranks])
        assert not list(self.out_dir.glob("step_*.tmp"))
        return out, err


@pytest.fixture
def trial(data_dir, tmp_path, whole) -> Trial:
    return Trial(tmp_path, data_dir, whole)


def equal(out_dir: Path, other: Path):
    """Assert that a run has logged the losses of the other, and ends with the same bits."""
    assert losses(out_dir) == losses(other)
    assert records(out_dir, "val_loss").items() >= records(other, "val_loss").items()
    assert digest(out_dir) == digest(other)


def snapshot(folder: Path) -> dict[Path, int]:
    """When each file was written, but the locks, which each process writes anew."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def flip(path: Path, bit: int):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def before(name: str, nth: int, act: Callable, on_rank: int, rank: int):
    """Injection: on one rank, act comes before the nth call of a function of the script or of a
    module in it, such as "train_step" or "checkpoint.save", and gets its arguments."""
    *owners, last = name.split(".")
    owner = train_gpt2
    for part in owners:
        owner = getattr(owner, part)
    function, calls = getattr(owner, last), itertools.count(1)

    def acted(*args, **kwargs):
        if rank == on_rank and next(calls) == nth:
            act(*args)
        return function(*args, **kwargs)

    setattr(owner, last, acted)


def at(name: str, nth: int, act: Callable, *args, on_rank: int = 0) -> Callable:
    return partial(before, name, nth, partial(act, *args), on_rank)


def send(number: int, *_):
    os.kill(os.getpid(), number)


def raise_error(error: Exception, *_):
    raise error


def large_scale(rank: int):
    """Injection: the first steps of --fp16 overflow."""
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=2.0**23)


def at_file_operation(nth: int, act: Callable, rank: int = 0):
    """Injection: act(None) comes before the nth operation of rank 0 on files; act(number) if it is
    a synchronization of that file, and act(path) after half of some tensors are written there."""
    calls, fsync, save_file = itertools.count(1), os.fsync, checkpoint.save_file

    def is_now() -> bool:
        return rank == 0 and next(calls) == nth

    def audit(event: str, args: tuple):
        writes = event == "open" and str(args[1])[0] in "wx"
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if (writes or changes) and is_now():
            act(None)

    def checked_fsync(number: int):
        if is_now():
            act(number)
        fsync(number)

    def checked_save_file(tensors, path: Path, *args):
        save_file(tensors, path, *args)
        if is_now():
            os.truncate(path, path.stat().st_size // 2)
            act(path)

    os.fsync, checkpoint.save_file = checked_fsync, checked_save_file
    sys.addaudithook(audit)


def die(place=None):
    """What was not synchronized is torn."""
    if isinstance(place, int):
        with suppress(OSError):  # a folder
            os.ftruncate(place, os.fstat(place).st_size // 2)
    os._exit(137)


def wait_for(condition: Callable, seconds: float = 300):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.02)


def refused(line: list[str], capfd) -> str:
    """The one line with which the program refuses a command line; it writes nothing."""
    before = snapshot(Path())
    capfd.readouterr()
    assert train_gpt2.main(line) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1, (out, err)
    assert snapshot(Path()) == before
    return err
