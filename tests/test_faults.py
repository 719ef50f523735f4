"""What must survive, by the numbers of the fault matrix. Each test breaks something, sees that it
broke, and compares what comes of it with the run that nothing happened to."""

import builtins
import errno
import itertools
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    content,
    digest,
    flags,
    losses,
    matrix,
    questions,
    records,
    start_ranks,
    state_after,
    train,
)
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file

import train_gpt2
from dataloader import DamagedShard
from model import GPT, GPTConfig
from support import checkpoint, device, ending, log, run_folder
from support.checkpoint import newest, verify
from support.files import FolderLock
from support.run_folder import checkpoints, step_of

resource = pytest.importorskip("resource")  # POSIX has it
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")
slow = pytest.mark.slow


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

    def command(self, **changes) -> list[str]:
        return [*flags(**{"data_dir": "data", "out_dir": "run"} | changes), "--resume"]

    def train(self, ranks: int = 1, inject=None, kill_after=None, **changes):
        return train(self.command(**changes), self.folder, ranks, kill_after, inject)

    def saved(self) -> list[int] | None:
        steps = [step_of(path) for path in checkpoints(self.out_dir)]
        return steps if self.out_dir.exists() else None

    def goes_on(self, ranks: int = 1, inject=None, **changes) -> tuple[str, str]:
        """Repeat the command: now it ends, and nothing shows what happened. Return what it said."""
        code, out, err = self.train(ranks, inject, data_dir=self.data, **changes)
        assert code == 0, err
        equal(self.out_dir, self.whole[ranks])
        assert not list(self.out_dir.glob("step_0*.tmp"))
        return out, err


@pytest.fixture
def trial(data_dir, tmp_path, whole) -> Trial:
    return Trial(tmp_path, data_dir, whole)


def equal(out_dir: Path, other: Path):
    assert losses(out_dir) == losses(other)
    assert digest(out_dir) == digest(other)


def flip(path: Path, bit: int):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def before(name: str, nth: int, act: Callable, on_rank: int, rank: int):
    """Injection: on one rank, act comes before the nth call of a function of the script or of
    support/, such as "train_step" or "checkpoint.save", and gets its arguments."""
    *owners, last = name.split(".")
    owner = train_gpt2
    for part in owners:
        owner = getattr(owner, part, None) or import_module(f"support.{part}")
    function, calls = getattr(owner, last), itertools.count(1)

    def acted(*args, **kwargs):
        if rank == on_rank and next(calls) == nth:
            act(*args)
        return function(*args, **kwargs)

    setattr(owner, last, acted)


def send(number: int, *_):
    os.kill(os.getpid(), number)


def raise_error(error: Exception, *_):
    raise error


def limit(name: str, size: int, *_):
    resource.setrlimit(getattr(resource, name), (size, size))


# ---- Every file operation of a save --------------------------------------------------------------


def crash(at: int, rank: int = 0):
    """Injection: die before the nth operation on files; what it would have synchronized is torn."""
    calls, fsync = itertools.count(1), os.fsync

    def audit(event: str, args: tuple):
        writes = event == "open" and str(args[1])[0] in "wx"
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if (writes or changes) and next(calls) == at:
            os._exit(137)

    def torn_fsync(fd):
        if next(calls) == at:
            with suppress(OSError):  # a folder
                os.ftruncate(fd, os.fstat(fd).st_size // 2)
            os._exit(137)
        fsync(fd)

    os.fsync = torn_fsync
    sys.addaudithook(audit)


def in_child(action: Callable, at: int) -> int:
    """The exit code of action in a process that dies before its nth operation; 0: it ended."""
    child = multiprocessing.get_context("fork").Process(target=lambda: (crash(at), action()))
    child.start()
    child.join()
    return child.exitcode


def save(out_dir: Path, step: int, keep: int = 2) -> Path:
    """Save a network whose weights are all `step`, and rotate."""
    model = GPT(GPTConfig(257, seq_len=8, n_layer=1, n_head=1, n_embd=8))
    for p in model.parameters():
        p.data.fill_(step)
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    path = checkpoint.save(FolderLock(out_dir), model, optimizer, state_after(step, "bytes"))
    checkpoint.rotate(out_dir, step, keep, {})
    return path


def is_whole(path: Path) -> bool:
    """Whether it is what save wrote for its step."""
    verify(path)
    tensors = load_file(path / "model.safetensors").values()
    return all(bool((tensor == step_of(path)).all()) for tensor in tensors)


@pytest.mark.parametrize("is_damaged", [True, pytest.param(False, marks=slow)])
def test_a_crash_at_every_operation_of_a_save_leaves_old_or_new(tmp_path, is_damaged):
    """Also where a step is saved for the second time, since its first checkpoint is damaged."""
    (tmp_path / "before").mkdir()
    for step in (1, 2, 3):
        last = save(tmp_path / "before", step)
    new = 3 if is_damaged else 4
    if is_damaged:
        flip(last / "model.safetensors", 9999)
    for at in itertools.count(1):
        out_dir = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        code = in_child(partial(save, out_dir, new), at)
        if code == 0:
            break
        assert code == 137
        paths = checkpoints(out_dir)
        assert len(paths) >= 2 - is_damaged and is_whole(newest(out_dir))
        assert all(is_whole(path) for path in paths if step_of(path) != new or not is_damaged)
        run_folder.take_folder(out_dir, FolderLock(out_dir), is_new=False)
        assert {path.name for path in out_dir.iterdir()} == {".lock", *(p.name for p in paths)}
    assert at > 20 and step_of(newest(out_dir)) == new


def test_a_save_is_on_the_disk_before_it_counts_and_before_an_older_one_goes(tmp_path, monkeypatch):
    """So no power failure takes it: a disk may keep what is not synchronized in any order."""
    synced, events, fsync = set(), [], os.fsync

    def logged_fsync(fd):
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.add(path.stat().st_ino)
        events.extend(["synced"] if path == tmp_path else [])

    def logged(rename, old, new):
        if Path(new).suffix != ".tmp":
            assert {path.stat().st_ino for path in (Path(old), *Path(old).iterdir())} <= synced
        events.append(Path(new).name)
        rename(old, new)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, partial(logged, getattr(os, name)))
    for step in range(1, 4):
        save(tmp_path, step)
    saves = [[f"step_00000{step}", "synced"] for step in range(1, 4)]
    assert events == [*itertools.chain(*saves), "step_000001.removed.tmp"]


# ---- Files of a checkpoint -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=slow)])
def test_any_flipped_bit_of_a_checkpoint_is_noticed_and_its_file_named(tmp_path, capsys, count):
    """As often in each file. A bit of SHA256SUMS may be one of another file's digest."""
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=new, check=True)
    rng, files = random.Random(count), sorted(new.glob("*[!d]"))  # all but README.md
    for i in range(count):
        file = files[i % len(files)]
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        assert newest(tmp_path) == old, (file, bit)
        err = capsys.readouterr().err
        assert "is damaged" in err and (file.name in err or file.name == checkpoint.SUMS)
        flip(file, bit)
    assert newest(tmp_path) == new


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(trial, name):
    shutil.copytree(trial.whole[1], trial.out_dir)
    path = checkpoints(trial.out_dir)[0] / name
    flip(path, 8 * path.stat().st_size // 2)
    out, err = trial.goes_on()
    assert "resumed after step 10" in out and f"run/step_000012/{name} is damaged: " in err


def test_a_file_that_can_not_be_read_is_a_damaged_one(tmp_path, capsys, monkeypatch):
    path, error = save(tmp_path, 1), OSError(errno.EIO, "a bad sector")
    monkeypatch.setattr(checkpoint.hashlib, "file_digest", partial(raise_error, error))
    with pytest.raises(ending.NoGoodCheckpoint):
        newest(tmp_path)
    assert f"{path}" in capsys.readouterr().err


def test_if_all_checkpoints_are_damaged_nothing_is_written(trial):
    shutil.copytree(trial.whole[1], trial.out_dir)
    for path in checkpoints(trial.out_dir):
        flip(path / "model.safetensors", 99_999)
    log = trial.log.read_bytes()
    code, _, err = trial.train(steps=20)
    assert code == 7 and "no checkpoint in run is good" in err
    assert err.count("model.safetensors is damaged") == len(checkpoints(trial.out_dir))
    assert trial.log.read_bytes() == log


def test_leftovers_are_ignored_and_removed_and_files_of_the_user_stay(trial):
    shutil.copytree(trial.whole[1], trial.out_dir)
    out_dir, mine = trial.out_dir, ("notes.tmp", "step_best", "step_12", "step_000099.pt")
    shutil.rmtree(out_dir / "step_000012")
    shutil.copytree(out_dir / "step_000010", out_dir / "step_000011.tmp")
    (out_dir / "step_000005.removed.tmp").mkdir()
    (out_dir / "step_000077").symlink_to("/nowhere")
    for name in mine:
        (out_dir / name).write_text("mine")
    trial.goes_on()
    assert all((out_dir / name).read_text() == "mine" for name in mine)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_rotation_never_counts_a_damaged_checkpoint_after_the_step_of_the_run(tmp_path, keep):
    for step in (5, 10):
        save(tmp_path, step)
    flip(tmp_path / "step_000010" / "state.json", 99)
    for step in (6, 7):
        assert save(tmp_path, step, keep) == newest(tmp_path)
    assert len({*map(step_of, checkpoints(tmp_path))} - {10}) == keep


def test_the_best_checkpoint_of_a_run_that_is_extended_stays(trial):
    """Its last validation was due because it was the last."""
    changes = {"save_every": 1, "eval_every": 3}
    assert trial.train(steps=5, **changes)[0] == 0
    assert trial.train(steps=10, learning_rate=5, **changes)[0] == 0
    by_step = records(trial.out_dir, "val_loss")
    assert min(by_step, key=by_step.get) == 5 and trial.saved() == [10, 9, 5]


@pytest.mark.parametrize("content", ["null", "0.1", '"a"', "[]", "NaN"])
def test_what_is_best_is_never_read_from_the_summary(trial, content):
    """It has no digest. Once, a changed number was a false best, and null a TypeError."""
    shutil.copytree(trial.whole[1], trial.out_dir)
    summary = trial.out_dir / "summary.json"
    true = json.loads(summary.read_bytes())
    summary.write_text(re.sub(r'(?<=val_loss": )[\d.]+', content, summary.read_text()))
    code, _, err = trial.train(steps=15, learning_rate=1)
    assert code == 0, err
    found = json.loads(summary.read_bytes())
    assert found["best_step"] == 12 and found["best_val_loss"] == true["val_loss"]
    assert records(trial.out_dir, "val_loss")[12] == true["val_loss"]


def test_losses_on_other_tokens_do_not_compete_for_the_best(trial):
    """Here, all tokens together are easier than the first ones."""
    changes = {"save_every": 1, "eval_every": 3, "learning_rate": 1e-9}
    assert trial.train(steps=9, **changes)[0] == 0
    first = records(trial.out_dir, "val_loss")[9]
    code, out, err = trial.train(steps=20, eval_tokens=16, **changes)
    by_step = {step: loss for step, loss in records(trial.out_dir, "val_loss").items() if step >= 9}
    assert code == 0 and first < min(by_step.values()), err
    best = min(by_step, key=by_step.get)
    assert f"best {by_step[best]:.4f} after step {best}; saved" in out
    assert best in trial.saved() and "the best checkpoint is chosen anew" in out


def test_a_resume_without_validation_keeps_the_best_checkpoint(trial):
    changes = {"save_every": 1, "eval_every": 3}
    assert trial.train(steps=5, **changes)[0] == 0
    assert trial.train(steps=8, learning_rate=5, **changes)[0] == 0
    assert trial.train(steps=12, eval_tokens=0, **changes)[0] == 0
    assert trial.saved() == [12, 11, 5]


def test_the_best_checkpoint_that_is_named_exists(trial):
    """Here, somebody has removed the best one."""
    changes = {"save_every": 1, "eval_every": 3}
    assert trial.train(steps=5, **changes)[0] == 0
    assert trial.train(steps=8, learning_rate=5, **changes)[0] == 0
    shutil.rmtree(trial.out_dir / "step_000005")
    assert trial.train(steps=10, learning_rate=5, **changes)[0] == 0
    summary = json.loads((trial.out_dir / "summary.json").read_bytes())
    assert summary["best_step"] in trial.saved()


# ---- Faults that end a run, and which code and words they end it with ----------------------------


def twice(*_):
    send(signal.SIGINT)
    send(signal.SIGINT)  # torchrun passes on what the terminal has sent: no second one
    time.sleep(2.2)
    send(signal.SIGINT)


def signal_in_callback(*_):
    """Python reports an exception in a callback of the garbage collector, and goes on."""
    watched = type("Watched", (), {})()
    _ref = weakref.ref(watched, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del watched


def bad_loss(run):
    run.model.register_forward_hook(lambda model, args, loss: loss * torch.nan)


def bad_gradient(run):
    next(run.model.parameters()).register_hook(lambda grad: grad * torch.inf)


def change_a_weight(run, *_):
    with torch.no_grad():
        next(run.model.parameters()).flatten()[0] += 1e-3


def no_memory(*_):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit("RLIMIT_AS", used + (1 << 24))
    torch.empty(1 << 28, dtype=torch.uint8)  # as much as a larger step would take


def little_room(free: int, rank: int):
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=free)


def break_shards(how: str, *_):
    for path in Path("data").glob("train*.bin"):
        data = path.read_bytes()
        path.unlink()
        if how == "link":
            path.symlink_to("/nowhere")
        else:
            path.write_bytes(data[:1100] if how == "cut" else data[:1024] + b"\xff" * 2018)


def full_log(*_):
    limit("RLIMIT_FSIZE", Path("run/log.jsonl").stat().st_size)


def no_log(run, *_):
    file = run.log.file
    write = partial(raise_error, NO_ROUTE)
    run.log.file = SimpleNamespace(name=file.name, fileno=file.fileno, write=write)


def vanishing_neighbour(rank: int):
    """Injection: a folder beside the run's vanishes while somebody looks there."""
    scandir, gone = os.scandir, FileNotFoundError(errno.ENOENT, "No such file or directory")
    Path("beside").mkdir(exist_ok=True)
    os.scandir = lambda path=".": raise_error(gone) if path == "beside" else scandir(path)


def port_in_use(rank: int):
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    port = socket.create_server(("127.0.0.1", 0)).detach()  # so that it stays open
    address = socket.socket(fileno=os.dup(port)).getsockname()
    os.environ.update(names | {"MASTER_PORT": str(address[1])})


def signal_to_all(rank: int):
    """Injection: while rank 0 writes a sample both ranks get a signal, as from a terminal."""
    Path(f"pid{rank}").write_text(str(os.getpid()))

    def to_all(*_):
        for path in sorted(Path().glob("pid*"), reverse=True):
            os.kill(int(path.read_text()), signal.SIGTERM)

    before("evaluate.samples", 1, to_all, 0, rank)


def other_machine(what: str, rank: int):
    """Injection: the second rank is on a machine with a disk of its own."""
    if rank == 0:
        return
    Path("other").mkdir()
    if what != "no data":
        shutil.copytree("data", "other/data")
    if what == "other data":
        Path("other/data/manifest.json").unlink()
        flip(min(Path("other/data").glob("train*")), 8 * 1100)
    if what in ("other weights", "a part of one"):
        shutil.copytree("run", "other/run")
    if what == "a part of one":
        (max(Path("other/run").glob("step_*")) / "optimizer.safetensors").unlink()
    if what == "other weights":
        flip(max(Path("other/run").glob("step_*")) / "model.safetensors", -100)
    os.chdir("other")


def at(function: str, nth: int, act: Callable, *args, on_rank: int = 0) -> Callable:
    return partial(before, function, nth, partial(act, *args), on_rank)


def end_hours(*_):
    ending.signals.end_at = 0


def fail_next(function: str, error: Exception, *_):
    before(function, 1, partial(raise_error, error), 0, 0)


def in_save(function: str, error: Exception) -> Callable:
    return at("checkpoint.save", 2, fail_next, function, error)


NO_SPACE, IO_ERROR = OSError(errno.ENOSPC, "No space left"), OSError(errno.EIO, "I/O error")
STALE, NO_ROUTE = OSError(errno.ESTALE, "Stale handle"), OSError(errno.EHOSTUNREACH, "no route")
GONE = SafetensorError("I/O error: Transport endpoint is not connected (os error 107)")
BUSY = PermissionError(errno.EACCES, "used by another program")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
NO_TENSORS = SafetensorError("I/O error: No space left on device")
FAULTS = {  # injection, ranks, exit code, words, checkpoints that are left (None: no folder)
    "a signal to rank 0 in a step": (at("train_step", 3, send, signal.SIGINT), 2, 3, "", [3]),
    "to rank 1": (at("train_step", 3, send, signal.SIGUSR1, on_rank=1), 2, 3, "", [3]),
    "the end of --max-hours on rank 1": (at("log_step", 7, end_hours, on_rank=1), 2, 3, "", [8, 5]),
    "to both in a sample": (signal_to_all, 2, 3, "", [12, 10]),
    "that Python ignores": (
        at("report.print_start", 1, signal_in_callback),
        1,
        130,
        "by a signal",
        [],
    ),
    "to rank 1 in the start": (
        at("make_model", 1, send, signal.SIGINT, on_rank=1),
        2,
        130,
        "by",
        None,
    ),
    "a NaN loss": (at("train_step", 4, bad_loss, on_rank=1), 2, 4, r" 1\).* 36 to 47", [3]),
    "an infinite gradient": (
        at("train_step", 4, bad_gradient, on_rank=1),
        2,
        4,
        r"\d and gradient",
        [3],
    ),
    "other weights": (
        at("log_step", 6, change_a_weight, on_rank=1),
        2,
        4,
        "10 the weights differ on rank 1",
        [5],
    ),
    "a full disk": (in_save("Path.mkdir", NO_SPACE), 1, 6, "10 can't .*No space", [5]),
    "for tensors": (in_save("checkpoint.save_file", NO_TENSORS), 1, 6, "No space", [5]),
    "no fsync": (in_save("checkpoint.sync", IO_ERROR), 1, 6, "I/O err", [5]),
    "a stale folder": (at("checkpoint.rotate", 2, raise_error, STALE), 1, 6, "Stale", [10, 5]),
    "a disk that goes": (
        at("checkpoint.check_read_back", 1, fail_next, "checkpoint.load_file", GONE),
        1,
        6,
        "5 can't be read back: .*not conn",
        [5],
    ),
    "no log": (at("log_step", 7, no_log), 1, 6, "no route.*log.jsonl", [5]),
    "a full log": (at("log_step", 7, full_log), 1, 6, "too large: '.*log.jsonl'", [5]),
    "of two ranks": (at("log_step", 7, full_log), 2, 6, "too large: '.*log.jsonl'", [5]),
    "a shard on rank 1": (
        at("evaluate.to_device", 30, raise_error, DamagedShard("it is cut"), on_rank=1),
        2,
        6,
        "it is cut",
        [5],
    ),
    "no room on rank 1": (
        at("train_step", 7, raise_error, NO_MEMORY, on_rank=1),
        2,
        2,
        "memory ran out",
        [5],
    ),
    "shards that are cut": (at("log_step", 3, break_shards, "cut"), 1, 6, "train_0000", []),
    "shards written over": (at("log_step", 3, break_shards, "other"), 1, 6, "train_0000", []),
    "shards that are gone": (at("log_step", 3, break_shards, "link"), 1, 6, "train_0000", []),
    "a folder in use": (
        at("checkpoint.remove", 1, raise_error, BUSY),
        1,
        0,
        "5 can't be",
        [12, 10],
    ),
    "a file in use": (
        at("checkpoint.remove", 1, fail_next, "checkpoint.shutil.rmtree", BUSY),
        1,
        0,
        "5 can't be",
        [12, 10],
    ),
    "a small disk": (partial(little_room, 10_000), 1, 6, "need 1.7 MB, but only 0.0 MB", None),
    "other data": (partial(other_machine, "other data"), 2, 2, "data is .* on rank 1 and", None),
    "no data": (partial(other_machine, "no data"), 2, 2, "data is not a folder of tokens", None),
    "a port in use": (port_in_use, 1, 2, "the ranks can't connect at 127.0.0.1:", None),
    "a neighbour vanishes": (vanishing_neighbour, 1, 0, "", [12, 10]),
    "no picture": (at("log.draw_losses", 1, raise_error, IO_ERROR), 1, 0, "", [12, 10]),
}
SLOW_FAULTS = {
    "a second signal": (at("train_step", 7, twice), 1, 130, "are not saved", [5]),
    "no memory": (at("log_step", 7, no_memory), 1, 2, "lower --micro-batch-size", [5]),
    "death of rank 0": (at("log_step", 7, send, signal.SIGKILL), 2, -9, "", [5]),
    "death of rank 1": (at("log_step", 7, send, signal.SIGKILL, on_rank=1), 2, 1, "", [5]),
    "a bug": (at("log_step", 7, raise_error, KeyError("a"), on_rank=1), 2, 1, "KeyError", [5]),
}


@pytest.mark.parametrize(
    "fault", [*FAULTS, *(pytest.param(name, marks=slow) for name in SLOW_FAULTS)]
)
def test_a_fault_ends_the_run_with_its_code_in_one_line_and_costs_no_checkpoint(trial, fault):
    inject, ranks, code, words, saved = (FAULTS | SLOW_FAULTS)[fault]
    processes = start_ranks(trial.command(), trial.folder, ranks, inject=inject)
    for process in processes:
        process.join(300)
    err = "".join((trial.folder / f"rank{rank}.err").read_text() for rank in range(ranks))
    assert processes[0].exitcode == code and re.search(words, err), err
    assert trial.saved() == saved
    if code > 1:
        lines = [line for line in err.splitlines() if line.startswith("train_gpt2.py: ")]
        assert "Traceback" not in err or "signal_in_callback" in err, err
        assert len(lines) == (code != 3) and len({p.exitcode for p in processes}) == 1, err
    trial.goes_on(ranks)


def test_a_resume_needs_no_room_for_the_checkpoints_that_are_there(trial):
    """Of --keep 2, the best, and one to write there is one, of 34,208 parameters."""
    trial.train(kill_after=11)
    trial.goes_on(inject=partial(little_room, 3 * 12 * 34_300))


OTHER_MACHINES = {
    "no checkpoint": (2, "the checkpoint is .* on rank 1 and .* on rank 0"),
    "a part of one": (2, "the checkpoint is .* on rank 1 and .* on rank 0"),
    "other weights": (4, "the weights differ on rank 1"),
}


@pytest.mark.parametrize("what", OTHER_MACHINES)
def test_ranks_whose_machines_hold_other_checkpoints_do_not_start(trial, what):
    """DDP would hide it: it gives the weights of the main rank to all, but no moments."""
    trial.train(kill_after=7)
    code, _, err = trial.train(2, partial(other_machine, what))
    expected, words = OTHER_MACHINES[what]
    assert code == expected and len(err.splitlines()) == 1 and re.search(words, err), err


# ---- What is beside a run ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "emptied", "foreign"])
def test_flags_and_state_of_a_resume_are_never_read_from_the_log(trial, how):
    """A flipped bit once was another learning rate, and an emptied log the default flags."""
    trial.train(kill_after=7)
    log = trial.log.read_bytes()
    flipped = log.replace(b'"learning_rate": 0.01', b'"learning_rate": 0.05', 1)
    foreign = b'null\n{"step": 1e999, "loss": []}\n' + b"[" * 100_000 + b"\n\xff\n\0\n"
    trial.log.write_bytes({"flipped": flipped, "emptied": b"", "foreign": foreign}[how])
    code, _, err = train(["--out-dir", "run", "--resume"], trial.folder)
    assert code == 0 and digest(trial.out_dir) == digest(trial.whole[1]), err


@pytest.mark.parametrize("name", ["summary.json", "loss.png", "step_000003", "step_000003.tmp"])
def test_a_folder_with_files_of_the_user_and_no_run_is_refused(trial, name):
    """With and without --resume; and as the newest of out/, where a resume looks."""
    for folder in (trial.out_dir, trial.folder / "out" / "2024"):
        folder.mkdir(parents=True)
        (folder / name).write_text("mine")
    for line in (trial.command(), trial.command()[:-1]):
        code, _, err = train([*line, "--log-every", "1"], trial.folder)
        assert code == 2 and f"--out-dir run holds {name} but no run" in err
    trial.train(out_dir=None, log_every=1)
    assert content(trial.out_dir) == content(trial.folder / "out/2024") == {name: b"mine"}


def test_a_resume_reads_no_more_of_the_log_than_its_end(trial):
    """A log of 4 GB, in a process that has no room for it."""
    changes = {"eval_every": 5, "log_every": 1}  # with log_every loss.png is drawn
    trial.train(kill_after=7, **changes)
    os.truncate(trial.log, 2**32)
    code, _, err = trial.train(inject=partial(limit, "RLIMIT_AS", 2**32), **changes)
    assert code == 0 and digest(trial.out_dir) == digest(trial.whole[1]), err
    assert trial.log.stat().st_size > 2**32
    trial.log.unlink()


def test_loss_png_and_the_state_of_a_million_steps_are_small(tmp_path):
    pytest.importorskip("matplotlib.figure")
    steps = [step for step in range(1, 1_000_001) if log.is_drawn(step, 1_000_000)]
    losses = {step: 3 + 1 / step for step in steps}
    assert 500 <= len(losses) <= 1000 and len(json.dumps(losses)) < 100_000
    log.draw_losses(tmp_path / "loss.png", "nano", losses, {10**6: 3.0})
    assert (tmp_path / "loss.png").stat().st_size < 100_000


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_of_another_repository_is_not_logged_as_the_programs(tmp_path, monkeypatch):
    """Where the program was copied into one, and where a hook of another one starts it."""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    monkeypatch.setattr(device, "REPO", tmp_path)
    assert device.commit() == commit
    (tmp_path / "copy").mkdir()
    monkeypatch.setattr(device, "REPO", tmp_path / "copy")
    assert device.commit() == ""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert device.commit() == ""


def test_with_dropout_a_resume_says_that_another_micro_batch_changes_the_run(trial):
    """It changes the dropout masks. Without dropout only the last bits differ."""
    for dropout in (0.1, 0.0):
        changes = {"out_dir": f"run{dropout}", "dropout": dropout}
        trial.train(kill_after=7, **changes)
        code, out, err = trial.train(micro_batch_size=3, **changes)
        assert code == 0 and "bit because of --micro-batch-size 3 instead of 2" in out, err
        assert ("so dropout masks may differ" in out) == bool(dropout)


# ---- Signals -------------------------------------------------------------------------------------


def wait_for(condition: Callable, seconds: float = 300):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.02)


def has_step(trial: Trial, step: int = 1) -> bool:
    return trial.log.exists() and f'"step": {step}, "loss"' in trial.log.read_text()


NOTHING_SAVED = ["corpus.open_data 1", "fit_micro_batch 1", "evaluate.validate 1"]
SAVED_BEFORE = {"evaluate.validate 3": 6, "evaluate.samples 2": 6, "evaluate.answers 2": 6}
SAVED_BEFORE |= {"log.draw_losses 2": 6, "draw 4": 12}
STEPS = {"train_step 5": 5, "log_step 4": 5, "checkpoint.save 1": 3, "checkpoint.save 3": 6}
PHASES = dict.fromkeys(NOTHING_SAVED) | SAVED_BEFORE | STEPS


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_saves_what_there_is_and_stops_at_once(trial, phase):
    """It does not wait for an evaluation, which the next process makes again."""
    changes = {"eval_every": 3, "hellaswag": questions(trial.folder), "sample_tokens": 5}
    name, nth = phase.split()
    code, out, err = trial.train(inject=at(name, int(nth), send, signal.SIGTERM), **changes)
    step = PHASES[phase]
    assert code == (130 if step is None else 3), err
    assert "Traceback" not in err
    if step is not None:
        assert trial.saved()[0] == max(losses(trial.out_dir), default=0) == step
        assert f"stopped after step {step}, which is saved" in out
    trial.goes_on(**changes)
    for name in ("val_loss", "sample", "hellaswag_acc"):
        assert {3, 6, 9, 12} <= records(trial.out_dir, name).keys()


def start(trial: Trial, env: dict | None = None, **changes) -> subprocess.Popen:
    """python train_gpt2.py, from nothing."""
    program = [sys.executable, train_gpt2.__file__, *trial.command(**changes)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, cwd=trial.folder, env=env, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "steps", "code"), [("stopped", 10**6, 3), ("done", 60, 0)])
def test_repeated_ctrl_c_changes_no_exit_code_once_all_is_saved(trial, word, steps, code):
    """From the last record of the log on, through the interpreter's shutdown."""
    with start(trial, steps=steps) as process:
        wait_for(lambda: has_step(trial))
        if word == "stopped":
            process.send_signal(signal.SIGINT)
        wait_for(lambda: f'"{word}": ' in trial.log.read_text())
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.0005)
        err = process.stderr.read()
    assert process.returncode == code and "Traceback" not in err, err


@pytest.mark.slow
def test_a_closed_terminal_and_a_poor_environment_stop_nothing(trial):
    """With few open files, and no home, for instance."""
    env = {"PYTHONIOENCODING": "ascii", "HOME": "/none", "TMPDIR": "/none"}
    with start(trial, env, eval_every=1) as process:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (32, 32))
        process.stdout.readline()
        process.stdout.close()
        process.stderr.close()
        wait_for(lambda: has_step(trial))
        process.send_signal(signal.SIGHUP)
        assert process.wait() == 0
    equal(trial.out_dir, trial.whole[1])


# ---- Two runs, hangs, torchrun -------------------------------------------------------------------


def test_two_runs_never_share_a_folder(trial):
    [first] = start_ranks(trial.command(steps=5000), trial.folder)
    wait_for(lambda: has_step(trial))
    line = trial.command(steps=3, out_dir=trial.out_dir, data_dir=trial.data)
    code, _, err = train(line, trial.folder / "two")
    assert code == 2 and "belongs to a live run" in err
    assert f"stop process {first.pid} on {platform.node()}, or use" in err
    first.kill()
    first.join()
    assert (trial.out_dir / ".process").exists()
    code, _, err = train(line, trial.folder / "two")
    assert code == 0, err  # the system freed the lock
    assert not (trial.out_dir / ".process").exists()


def other_run(*_):
    Path("run").mkdir()
    Path("run", "log.jsonl").touch()
    save(Path("run"), 3)


def test_a_folder_that_another_run_wrote_to_meanwhile_is_not_taken(trial):
    """Between the look for the folder and its lock data may be prepared, for minutes."""
    line = trial.command()[:-1]
    code, _, err = train(line, trial.folder, inject=at("corpus.open_data", 1, other_run))
    assert code == 2 and trial.saved() == [3], err


def short_watchdog(seconds: int):
    os.dup2(sys.stderr.fileno(), 2)  # where faulthandler writes
    train_gpt2.ending.TIMEOUT_S = seconds


def stop_second(rank: int):
    """Injection: the second rank stops in step 7; a hang is five seconds without progress."""
    short_watchdog(5)
    before("train_step", 7, partial(send, signal.SIGSTOP), 1, rank)


@slow
def test_a_hang_ends_with_the_stacks(trial):
    first, second = start_ranks(trial.command(), trial.folder, 2, inject=stop_second)
    first.join(120)
    second.kill()
    second.join()
    err = (trial.folder / "rank0.err").read_text()
    assert first.exitcode == 1 and "no progress for 5 s" in err and "in train_step\n" in err
    trial.goes_on(2)


MOMENTS = {
    "start": ("fit_micro_batch", 1),
    "step": ("train_step", 7),
    "save": ("checkpoint.save", 2),
    "validation": ("evaluate.validate", 2),
    "sample": ("evaluate.samples", 1),
}
PAUSES = [("step", 1), ("save", 2)]
OTHER_PAUSES = {*itertools.product(MOMENTS, (1, 2))} - {*PAUSES}
PAUSES += [pytest.param(*pause, marks=slow) for pause in sorted(OTHER_PAUSES)]


def take_away(how: str, *_):
    Path("run").rename("moved")
    if how == "replaced":  # by a second run, as the name was free
        Path("run").mkdir()
        Path("run", ".lock").touch()


@pytest.mark.parametrize("how", ["moved", "replaced"])
@pytest.mark.parametrize(("moment", "ranks"), PAUSES)
def test_a_run_writes_only_into_the_folder_that_it_has_locked(trial, moment, ranks, how):
    """Its own is moved, or its disk unmounted. Put back, it goes on."""
    code, _, err = trial.train(ranks, at(*MOMENTS[moment], take_away, how))
    assert code == 6 and "run is gone, or another folder has its name" in err, err
    assert len(err.splitlines()) == 1 or moment in ("sample", "validation")
    if how == "replaced":
        assert content(trial.out_dir) in ({".lock": b""}, {".lock": b"", "log.jsonl": b""})
        shutil.rmtree(trial.out_dir)
    assert not trial.out_dir.exists()
    (trial.folder / "moved").rename(trial.out_dir)
    trial.goes_on(ranks)


PAUSE_S = 9  # three limits of the watchdog; a busy machine may hold a process up for one second


def stop_all(moment: str, rank: int):
    """Injection: all ranks are stopped for three limits of the watchdog."""
    train_gpt2.ending.TIMEOUT_S = PAUSE_S / 3
    Path(f"pid{rank}").write_text(str(os.getpid()))

    def act(*_):
        pids = " ".join(path.read_text() for path in Path().glob("pid*"))
        subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; sleep {PAUSE_S}; kill -CONT {pids}"])
        time.sleep(0.5)

    before(*MOMENTS[moment], act, 0, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "ranks"), PAUSES)
def test_a_pause_is_no_hang(moment, ranks, trial):
    trial.goes_on(ranks, partial(stop_all, moment))


def save_slowly(rank: int):
    """Injection: a save on a slow disk takes three limits of the watchdog."""
    train_gpt2.ending.TIMEOUT_S = PAUSE_S / 3
    before("checkpoint.save", 2, lambda *_: time.sleep(PAUSE_S), 0, rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slow_disk_is_no_hang(ranks, trial):
    trial.goes_on(ranks, save_slowly)


def hold_output(rank: int):
    """Injection: for three limits of the watchdog nobody reads the output, as with `less`."""
    train_gpt2.ending.TIMEOUT_S = PAUSE_S / 3
    os.dup2(sys.stderr.fileno(), 2)
    reader, writer = os.pipe()
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; cat > read"], stdin=reader)
    os.close(reader)
    sys.stdout = open(writer, "w")
    os.dup2(writer, 1)
    os.set_blocking(1, False)
    with suppress(BlockingIOError):
        while True:
            os.write(1, bytes(1 << 16))
    os.set_blocking(1, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_a_reader_that_holds_the_output_stops_no_run(ranks, trial):
    trial.goes_on(ranks, hold_output)
    assert "done: 12 steps" in (trial.folder / "read").read_text()


def slow_typist(rank: int):
    """Injection: a prompt takes longer than the watchdog waits."""
    short_watchdog(1)
    sys.stdin = open(os.openpty()[1])
    texts = iter(["a", "b"])
    builtins.input = lambda _: time.sleep(1.5) or next(texts, None) or raise_error(EOFError())


@pytest.mark.slow
def test_a_prompt_that_takes_long_to_type_is_no_hang(whole, tmp_path):
    line = [str(whole[1]), "--sample-tokens", "3"]
    code, out, err = train(line, tmp_path, inject=slow_typist, script="sample")
    assert code == 0 and out.startswith("a") and "\nb" in out, err


def torchrun(trial: Trial, *options: str, **changes) -> subprocess.Popen:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = [*program, *options, train_gpt2.__file__, *trial.command(**changes)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(line, cwd=trial.folder, stderr=quiet, start_new_session=True)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """The processes of a torchrun that run the program already, once there are two."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
    found = [pid for pid, line in lines.items() if train_gpt2.__file__.encode() in line]
    return found if len(found) == 2 else []


def lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/exe")  # a zombie has none


@slow
@pytest.mark.parametrize("after_s", [0, 0.1, 0.3, 0.6, 1, 1.5, 2, 3, 5, "a step"])
def test_the_ranks_of_a_torchrun_that_is_killed_end_within_five_seconds(trial, after_s):
    """Also before they have imported torch, and know that they are ranks."""
    launcher = torchrun(trial, steps=10**6)
    wait_for(lambda: ranks_of(launcher))
    ranks = ranks_of(launcher)
    if after_s == "a step":
        wait_for(lambda: has_step(trial))
    else:
        time.sleep(after_s)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(lives, ranks)), seconds=5)
    if trial.out_dir.exists():
        FileLock(trial.out_dir / ".lock").acquire(timeout=5)  # raises if a rank holds it


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_torchrun_passes_a_signal_on_and_the_run_is_saved(trial, number):
    option = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP"
    launcher = torchrun(trial, option, steps=10**6)
    wait_for(lambda: has_step(trial))
    launcher.send_signal(number)
    launcher.wait(120)
    assert trial.saved()[0] == max(losses(trial.out_dir))


@slow
def test_torchrun_restarts_a_killed_rank_without_help(trial):
    launcher = torchrun(trial, "--max-restarts=10", save_every=1, steps=160)
    for starts, step in enumerate((3, 60), 1):
        wait_for(lambda step=step: has_step(trial, step))
        os.kill(ranks_of(launcher)[-1], signal.SIGKILL)
        wait_for(lambda n=starts: trial.log.read_text().count('"resumed"') > n)
    assert launcher.wait(600) == 0
    assert list(losses(trial.out_dir)) == list(range(1, 161))


@slow
def test_what_torchrun_prints_ends_with_the_mistake(tmp_path):
    """Its own traceback comes after our line, and would push it off the screen."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for mistake in (["--data-dir", "nowhere"], ["--stesp=3"]):
        command = [*program, train_gpt2.__file__, *mistake]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        assert mistake[0] in "".join(done.stderr.splitlines()[-3:]), done.stderr
        assert done.stderr.count(f"train_gpt2.py: error: {'--data' if mistake[1:] else 'unr'}") == 1


# ---- Exact resume --------------------------------------------------------------------------------

ADAMW, MUON = {"muon": False, "dropout": 0}, {"muon": True, "dropout": 0.1}
LONG = {"steps": 20, "batch_tokens": 384, "num_samples": 0}


def copies(rank: int):
    """Injection: what a SIGKILL after each step would leave in the folder is copied."""
    log_step = train_gpt2.log_step

    def log_and_copy(run, *args):
        log_step(run, *args)
        if rank == 0:
            shutil.copytree("run", f"killed{run.step}/run")

    train_gpt2.log_step = log_and_copy


@slow
@pytest.mark.parametrize("steps", [range(n, 21, 4) for n in range(1, 5)], ids=str)
@pytest.mark.parametrize("changes", [ADAMW, MUON], ids=["adamw", "muon-dropout"])
@pytest.mark.parametrize("ranks", [4, 3, 2, 1])
def test_a_run_killed_after_any_step_goes_on_to_the_same_bits(trial, once, ranks, changes, steps):
    """20 steps: three epochs of shards of a prime length."""
    line = trial.command(data_dir=trial.data, save_every=1, **LONG, **changes)

    def make(folder: Path):
        assert train(line, folder, ranks, inject=copies)[0] == 0

    made = once(f"20-steps-{changes['muon']}-on-{ranks}", make)
    for step in steps:
        folder = shutil.copytree(made / f"killed{step}", trial.folder / str(step))
        code, out, err = train(line, folder, ranks)
        begin = f"resumed after step {step - 1}" if step > 1 else "new"
        assert code == 0 and f"run: run, {begin}\n" in out, err
        equal(folder / "run", made / "run")


# ---- The soak, and the matrix itself -------------------------------------------------------------


@slow
def test_the_soak_finds_nothing_lost(tmp_path, monkeypatch):
    """For an hour, and with longer runs: python tests/soak.py --minutes 60."""
    import soak

    monkeypatch.setattr(soak, "STEPS", 120)
    *_, counts = soak.soak(0.3, [2], 5, tmp_path)
    assert counts["starts"] > counts["runs"] >= 1 and not counts["runs that differ"]


def test_every_row_of_the_matrix_has_a_test_or_a_reason():
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    for row, (injected, tests) in matrix().items():
        assert injected and tests, row
        for name in tests:
            assert f"def {name}(" in written or injected.startswith("does not apply"), name
