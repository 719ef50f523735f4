"""What must survive, by the numbers of the fault matrix. Each test breaks something, sees that it
broke, and compares what comes of it with the run that nothing happened to."""

import builtins
import errno
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
import zipfile
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    digest,
    finish,
    flags,
    matrix,
    questions,
    records,
    start_ranks,
    state_of,
    train,
)

import prepare_data
import train_gpt2
from support import files, inputs
from support.checkpoint import (
    checkpoints,
    is_good,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from support.device import cpu_name

resource = pytest.importorskip("resource")  # POSIX has it
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")


@pytest.fixture(scope="session")
def oracle(whole) -> dict[int, Path]:
    """Folders of uninterrupted runs of 12 steps."""
    return whole


def equal(out_dir: Path, other: Path):
    assert records(out_dir, "loss") == records(other, "loss")
    assert digest(out_dir) == digest(other)


def command(data_dir, **changes) -> list[str]:
    return [*flags(**{"data_dir": data_dir, "out_dir": "run"} | changes), "--resume"]


def goes_on(data_dir, folder: Path, oracle: dict, ranks: int = 1):
    """The same command, again: now it ends, and nothing shows what happened."""
    code, _, err = train(command(data_dir), folder, ranks)
    assert code == 0, err
    equal(folder / "run", oracle[ranks])


def fired(folder: Path) -> bool:
    return (folder / "fired").exists()


def at_step(step: int, act, rank_of: int, rank: int):
    """Injection: after step, on rank_of, act."""
    log_step = train_gpt2.log_step

    def log_and_act(run, *args):
        log_step(run, *args)
        if run.state.step == step and rank == rank_of:
            Path("fired").touch()
            act(run)

    train_gpt2.log_step = log_and_act


# --------------------------------------------------------------------------------------------------
# Every system call of a save


class Crash:
    """Ends this process before its nth operation on files, which is after the one before it, and
    counts them."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def wrap(self, function):
        def wrapped(*args, **kwargs):
            self.count += 1
            if self.count == self.at:
                os._exit(137)
            return function(*args, **kwargs)

        return wrapped

    def install(self):
        for name in ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir"):
            setattr(os, name, self.wrap(getattr(os, name)))
        plain = builtins.open

        def opened(file, mode="r", *args, **kwargs):
            if mode[0] == "r" and "+" not in mode:
                return plain(file, mode, *args, **kwargs)
            f = self.wrap(plain)(file, mode, 0, **kwargs) if "b" in mode else plain(file, mode)
            return Writer(f, self) if "b" in mode else f

        builtins.open = opened


class OtherFile:
    """A file of which a subclass changes something."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


class Writer(OtherFile):
    """A file whose writes count."""

    def __init__(self, file, crash: Crash):
        super().__init__(file)
        self.write, self.truncate = crash.wrap(file.write), crash.wrap(file.truncate)


def in_child(action, crash: Crash) -> int:
    """The exit code of action in a process of its own, 0 if it came to its end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            crash.install()
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def newest(out_dir: Path) -> dict:
    return newest_checkpoint(out_dir, print)[1]


def crash_points(folder: Path, num_before: int, check) -> int:
    """Crash before each operation of one save in a folder that holds num_before
    checkpoints; check what is left each time."""
    before = folder / "before"
    before.mkdir()
    for step in range(1, num_before + 1):
        save_checkpoint(before, state_of(step, optimizer={}), keep=2)
    for at in itertools.count(1):
        out_dir = shutil.copytree(before, folder / f"{at}")
        state = state_of(num_before + 1, optimizer={})  # with few parts, so few points
        save = partial(save_checkpoint, out_dir, state, keep=2)
        code = in_child(save, Crash(at))
        check(out_dir)
        if code == 0:
            return at - 1
        assert code == 137


@pytest.mark.parametrize("num_before", [1, 4])
def test_a_crash_at_every_operation_of_a_save_leaves_old_or_new(
    tmp_path, num_before, shapes_at_hand, record_property
):
    def check(out_dir: Path):
        step = newest(out_dir)
        paths = checkpoints(out_dir)
        assert step["step"] in (num_before, num_before + 1)
        for path in paths:
            saved = read_checkpoint(path)
            assert {float(x) for t in saved["model"].values() for x in t.view(-1)} == {
                float(saved["step"])
            }
        assert len(paths) >= min(2, num_before)

    points = crash_points(tmp_path, num_before, check)
    record_property("crash points", f"{points} of a save with {num_before} checkpoints before it")
    assert points > 10


def test_a_save_that_was_acknowledged_survives_a_power_failure(tmp_path, monkeypatch):
    """Each moment of a save is replayed on a disk that keeps a file's content only from its last
    fsync, and of a folder's new names any first few of those after its last fsync."""
    out_dir, log, plain = tmp_path / "run", [], {n: getattr(os, n) for n in ("fsync", "replace")}
    out_dir.mkdir()
    names = {}

    def fsync(fd):
        plain["fsync"](fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        log.append(("dir",) if path.is_dir() else ("content", path.name, path.read_bytes()))

    def replace(old, new):
        log.append(("name", Path(old).name, Path(new).name))
        plain["replace"](old, new)

    unlink = Path.unlink
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda path, **more: (
            log.append(("gone", path.name)) if path.exists() else None,
            unlink(path, **more),
        )[1],
    )
    acknowledged = {}
    for step in range(1, 5):
        save_checkpoint(out_dir, state_of(step), keep=2)
        acknowledged[len(log)] = step
    monkeypatch.undo()
    assert sum(event[0] == "dir" for event in log) == 4
    cases = 0
    for end in range(len(log) + 1):
        last = max((n for n in acknowledged if n <= end), default=0)
        for kept, torn in itertools.product(range(4), (b"", b"half")):
            replayed = tmp_path / "replayed"
            shutil.rmtree(replayed, ignore_errors=True)
            replayed.mkdir()
            for name, content in replay(log[:end], kept, torn).items():
                (replayed / name).write_bytes(content)
            cases += 1
            saved = newest(replayed) if last else None
            if last:
                assert saved["step"] >= acknowledged[last], (end, kept, torn)
    assert cases > 80 and not names


def replay(log: list[tuple], kept: int, torn: bytes) -> dict[str, bytes]:
    """The files after a power failure: all names up to the last fsync of the folder, then kept
    more; content that was never synchronized is torn."""
    synced = max((i for i, event in enumerate(log) if event[0] == "dir"), default=-1)
    contents, files, more = {}, {}, kept
    for i, event in enumerate(log):
        if event[0] == "content":
            contents[event[1]] = event[2]
            continue
        if event[0] == "dir":
            continue
        more -= i > synced
        if more < 0:
            break
        if event[0] == "name":
            files[event[2]] = contents.pop(event[1], torn)
        else:
            files.pop(event[1], None)
    return files


# --------------------------------------------------------------------------------------------------
# Checkpoint files


def test_no_damaged_byte_of_a_checkpoint_is_loaded(tmp_path):
    whole = save_checkpoint(tmp_path, state_of(7), keep=2).read_bytes()
    path = tmp_path / "checkpoint_000007.pt"
    expected = read_checkpoint(path)
    rng, seen = np.random.default_rng(0), 0
    places = rng.integers(0, len(whole), 60)
    damaged = [whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :] for n in places]
    damaged += [whole[:n] for n in (0, len(whole) // 100, len(whole) // 2, len(whole) - 1)]
    damaged += [whole[:n] + bytes(200) + whole[n + 200 :] for n in range(0, len(whole) - 200, 997)]
    for content in damaged:
        path.write_bytes(content)
        try:
            saved = read_checkpoint(path)
        except ValueError as error:
            seen += 1
            assert len(str(error).splitlines()) == 1
        else:  # in the padding between the parts, or in a time stamp
            assert saved["step"] == 7 and all(
                torch.equal(saved["model"][name], expected["model"][name])
                for name in saved["model"]
            )
    assert seen > len(damaged) / 3


def test_leftovers_are_ignored_and_removed(oracle, data_dir, tmp_path):
    out_dir = shutil.copytree(oracle[1], tmp_path / "run")
    for step in (11, 12):
        (out_dir / f"checkpoint_0000{step}.pt").unlink(missing_ok=True)
    (out_dir / "checkpoint_000011.pt.tmp").write_bytes(b"half")
    (out_dir / "12").mkdir()
    (out_dir / "notes.tmp").write_text("mine")
    (out_dir / "checkpoint_best.pt").write_text("mine")
    (out_dir / "link.pt").symlink_to("/nowhere")
    goes_on(data_dir, tmp_path, oracle)
    assert not list(out_dir.glob("checkpoint_*.tmp"))
    assert all(
        (out_dir / name).read_text() == "mine" for name in ("notes.tmp", "checkpoint_best.pt")
    )


def full_disk(at_step: int, rank: int):
    """Injection: the disk is full from a save on."""
    plain = builtins.open

    def opened(file, mode="r", *args, **kwargs):
        f = plain(file, mode, *args, **kwargs)
        return Full(f) if str(file).endswith(f"{at_step:06d}.pt.tmp") and mode != "rb" else f

    files.open = opened


class Full(OtherFile):
    """A file with little room."""

    room = 20_000

    def write(self, content):
        self.room -= len(content)
        if self.room < 0:
            Path("fired").touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(content)


def test_a_full_disk_is_named_and_the_old_checkpoint_stays(oracle, data_dir, tmp_path):
    code, _, err = train(command(data_dir), tmp_path, inject=partial(full_disk, 10))
    assert fired(tmp_path) and code == 6
    assert re.fullmatch(r".*checkpoint_000010.pt can't be written: .*No space.*GB are free\n", err)
    assert [path.name for path in (tmp_path / "run").glob("*.pt*")] == ["checkpoint_000005.pt"]
    goes_on(data_dir, tmp_path, oracle)


@pytest.mark.parametrize("room", [0, 2300])
def test_a_log_that_can_not_grow_is_named(oracle, data_dir, tmp_path, room):
    """At the start of a resumed run, or in it."""
    train(command(data_dir), tmp_path, kill_after=7)
    log = tmp_path / "run" / "log.jsonl"
    log.write_bytes(log.read_bytes() + b"\n" * 2**20)  # larger than a checkpoint
    limit = log.stat().st_size + room
    limits = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    line = command(data_dir, save_every=0)
    code, _, err = train(line, tmp_path, inject=partial(call, limits))
    assert code == 6 and re.search(r"error: .*File too large: '.*log.jsonl'", err)
    assert len(err.splitlines()) == 1 and has_resumed(tmp_path) == bool(room)
    goes_on(data_dir, tmp_path, oracle)


def has_resumed(folder: Path) -> bool:
    return any("resumed" in record for record in train_gpt2.log.read_log(folder / "run"))


def call(function, rank: int):
    function()


def in_background(rank: int):
    train_gpt2.folder.Saver.in_background = property(lambda self: True)


def test_a_save_in_the_background_holds_the_state_of_its_step(oracle, data_dir, tmp_path):
    """As with a GPU: the weights change while the copy is written."""
    line = command(data_dir, save_every=1)
    assert train(line, tmp_path, inject=in_background, kill_after=9)[0] not in range(8)
    steps = [read_checkpoint(p)["step"] for p in checkpoints(tmp_path / "run")]
    assert steps[0] >= 7
    assert train(line, tmp_path, inject=in_background)[0] == 0
    equal(tmp_path / "run", oracle[1])
    state = {"a": {"b": torch.zeros(3)}, "step": 1}
    state["tied"] = state["a"]["b"]
    copies = {}
    copy = train_gpt2.folder.copied(state, copies)
    assert copy["tied"] is copy["a"]["b"]
    state["a"]["b"] += 1
    assert torch.equal(copy["a"]["b"], torch.zeros(3))
    again = train_gpt2.folder.copied(state, copies)
    assert again["a"]["b"] is copy["a"]["b"] and torch.equal(again["tied"], torch.ones(3))


def full_disk_in_background(rank: int):
    in_background(rank)
    full_disk(5, rank)


def test_a_background_save_that_fails_ends_the_run_after_a_good_one(oracle, data_dir, tmp_path):
    """At once, not when the next one is due, and with the state of that step saved."""
    line = command(data_dir, batch_tokens=192 * 16, micro_batch_size=1)
    code, out, err = train(line, tmp_path, inject=full_disk_in_background)
    assert fired(tmp_path) and code == 6 and "checkpoint_000005.pt can't be written: " in err
    [path] = checkpoints(tmp_path / "run")
    assert 5 < read_checkpoint(path)["step"] < 10 and "stopped" not in out


def little_room(rank: int):
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=10_000)


def test_too_little_room_is_refused_before_the_first_step(data_dir, tmp_path):
    code, _, err = train(command(data_dir), tmp_path, inject=little_room)
    assert code == 2 and re.search(r"4 more checkpoints need .* GB, and 0.0 GB are free", err)
    assert not (tmp_path / "run").exists()


def failing_fsync(rank: int):
    fsync, calls = os.fsync, []

    def fail_third(fd):
        calls.append(fd)
        if len(calls) == 3:
            Path("fired").touch()
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    os.fsync = fail_third


def test_a_save_that_can_not_be_synchronized_does_not_count(oracle, data_dir, tmp_path):
    code, _, err = train(command(data_dir), tmp_path, inject=failing_fsync)
    assert fired(tmp_path) and code == 6 and "Input/output error" in err
    assert [path.name for path in (tmp_path / "run").glob("*.pt*")] == ["checkpoint_000005.pt"]
    goes_on(data_dir, tmp_path, oracle)


def test_a_rotation_keeps_good_checkpoints_and_the_best(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, state_of(step), keep=2)
    bad = tmp_path / "checkpoint_000003.pt"
    bad.write_bytes(bad.read_bytes()[:-9])
    save_checkpoint(tmp_path, state_of(4), keep=2)
    assert [p.name for p in checkpoints(tmp_path) if is_good(p)] == [
        "checkpoint_000004.pt", "checkpoint_000002.pt"]  # fmt: skip
    losses = {1: 0.1, 2: 1.0, 4: 2.0, 5: 3.0}
    for step in (5, 6, 7):
        save_checkpoint(tmp_path, state_of(step, val_losses=losses), keep=2)
    assert newest(tmp_path)["val_losses"] == {2: 1.0, 5: 3.0}  # of those that were there
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == [f"checkpoint_00000{step}.pt" for step in (7, 6, 2)]


def test_a_damaged_log_costs_no_checkpoint(oracle, data_dir, tmp_path):
    """Lines with a flipped bit, or that are JSON but no records: saves and rotations go on."""
    line = command(data_dir, save_every=1, eval_every=2)
    train(line, tmp_path, kill_after=7)
    log = tmp_path / "run" / "log.jsonl"
    lines = [text.replace('"step"', '"stdp"') for text in log.read_text().splitlines()]
    lines += ["null", "7", "[1]", '{"step": "x", "val_loss": {}}', '{"step": 1e999, "loss": []}']
    lines += ['{"step": 3, "val_loss": null}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}"]
    log.write_bytes("\n".join(lines).encode() + b"\n\xff\n\0\n")
    code, _, err = train(line, tmp_path)
    assert (code, err) == (0, "") and digest(tmp_path / "run") == digest(oracle[1])
    assert len(checkpoints(tmp_path / "run")) <= 3


def test_the_best_checkpoint_of_a_run_that_is_extended_stays(data_dir, tmp_path):
    """Its last validation was due because it was the last."""
    changes = {"save_every": 1, "eval_every": 3, "keep": 2}
    assert train(command(data_dir, steps=5, **changes), tmp_path)[0] == 0
    line = command(data_dir, steps=10, learning_rate=5, **changes)
    assert train(line, tmp_path)[0] == 0
    losses = records(tmp_path / "run", "val_loss")
    assert min(losses, key=losses.get) == 5
    names = [path.name for path in checkpoints(tmp_path / "run")]
    assert names == [f"checkpoint_{step:06d}.pt" for step in (10, 9, 5)]


@pytest.mark.parametrize("change", [
    {"steps": -5}, {"steps": 2**80}, {"warmup_steps": 10**6}, {"learning_rate": float("nan")},
    {"cosine": "yes"}, {"model": "gpt5"},
])  # fmt: skip
def test_flags_of_a_checkpoint_that_no_run_can_have_are_a_damage(
    oracle, data_dir, tmp_path, change
):
    out_dir = shutil.copytree(oracle[1], tmp_path / "run")
    checkpoints(out_dir)[1].unlink()
    saved = read_checkpoint(checkpoints(out_dir)[0])
    save_checkpoint(out_dir, saved | {"config": saved["config"] | change}, keep=3)
    log = (out_dir / "log.jsonl").read_bytes()
    code, _, err = train(command(data_dir, steps=20), tmp_path)
    assert code == 7 and len(err.splitlines()) == 2 and "is damaged: " in err
    assert (out_dir / "log.jsonl").read_bytes() == log


def test_every_flag_may_change_or_not():
    names = {f.name for f in fields(train_gpt2.TrainConfig)}
    classes = [set(train_gpt2.FIXED), set(train_gpt2.UNSEEN), set(train_gpt2.ROUNDING)]
    assert all(some < names for some in classes)
    assert not any(a & b for a, b in itertools.combinations(classes, 2))


def test_another_machine_goes_on_and_says_that_the_bits_differ(oracle, data_dir, tmp_path):
    out_dir = shutil.copytree(oracle[1], tmp_path / "run")
    checkpoints(out_dir)[0].unlink()
    saved = read_checkpoint(checkpoints(out_dir)[0])
    saved["environment"] |= {"torch": "2.12.0", "threads": 7}
    save_checkpoint(out_dir, saved, keep=3)
    code, out, err = train(command(data_dir), tmp_path)
    assert code == 0, err
    assert re.search(r"not bit for bit because of torch 2\.13.* instead of 2.12.0, threads 1", out)


@pytest.mark.parametrize("was", ["", "Another CPU, AVX2"])
def test_another_processor_is_said_if_it_is_known(oracle, data_dir, tmp_path, was):
    out_dir = shutil.copytree(oracle[1], tmp_path / "run")
    checkpoints(out_dir)[0].unlink()
    saved = read_checkpoint(checkpoints(out_dir)[0])
    assert saved["environment"]["device_name"] == cpu_name(Path("/proc/cpuinfo"))
    saved["environment"]["device_name"] = was
    save_checkpoint(out_dir, saved, keep=3)
    code, out, err = train(command(data_dir), tmp_path)
    assert code == 0, err
    assert ("not bit for bit because of device_name " in out) == bool(was)
    assert f" instead of {was}" in out or not was


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def hostile_files(folder: Path) -> dict[str, bytes]:
    good = save_checkpoint(folder, state_of(3), keep=2)
    with zipfile.ZipFile(good) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    stem = next(iter(parts)).split("/")[0]
    files = {"a plain pickle": pickle.dumps(Evil())}
    changes = {
        "code in the archive": {f"{stem}/data.pkl": pickle.dumps(Evil(), protocol=2)},
        "names that lead out": {"../../out": b"x"},
        "a header that lies": {
            f"{stem}/data.pkl": parts[f"{stem}/data.pkl"].replace(b"K2", b"M\xff\xff")
        },
    }
    for name, change in changes.items():
        with zipfile.ZipFile(folder / "new", "w") as archive:
            for part, content in (parts | change).items():
                archive.writestr(part, content)
        files[name] = (folder / "new").read_bytes()
    with zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_DEFLATED) as archive:
        for part, content in (parts | {f"{stem}/data/0": bytes(50_000_000)}).items():
            archive.writestr(part, content)
    files["a bomb"] = (folder / "new").read_bytes()
    return files


def test_a_hostile_checkpoint_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in hostile_files(tmp_path).items():
        bad = Path("checkpoint_000003.pt")
        bad.write_bytes(content)
        before = train_gpt2.device.peak_memory_mib(torch.device("cpu"))
        with pytest.raises(ValueError, match=r"checkpoint_000003\.pt is damaged"):
            read_checkpoint(bad)
        assert train_gpt2.device.peak_memory_mib(torch.device("cpu")) - before < 40, name
    assert not Path("executed").exists() and not Path("../../out").exists()


def test_the_newest_checkpoint_is_told_by_its_step(tmp_path):
    for step in (1, 2):
        os.utime(save_checkpoint(tmp_path, state_of(step), keep=2), (10 - step, 10 - step))
    assert newest(tmp_path)["step"] == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it stays open
def test_warming_up_leaves_no_trace(data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = flags(data_dir=data_dir, out_dir="run")
    config, given, _ = train_gpt2.parse_args(line, "cpu")
    run = train_gpt2.set_up(config, given, None, train_gpt2.ranks.find_world({}, 0))
    run.lock[0].close()
    before = pickle.dumps(run.state.state_dict()), torch.get_rng_state()
    train_gpt2.made_up_pass(run.net, run.config, run.world)
    assert pickle.dumps(run.state.state_dict()) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in run.state.model.parameters())


def test_a_checkpoint_that_is_not_finite_is_not_taken(oracle, data_dir, tmp_path):
    out_dir = shutil.copytree(oracle[1], tmp_path / "run")
    path = checkpoints(out_dir)[0]
    saved = torch.load(path, weights_only=True)
    next(iter(saved["model"].values())).view(-1)[5] = torch.nan
    save_checkpoint(out_dir, saved | {"step": 11}, keep=3)
    path.unlink()
    code, out, err = train(command(data_dir), tmp_path)
    assert code == 0 and "resumed after step 10" in out and "numbers that are not finite" in err
    equal(out_dir, oracle[1])


# --------------------------------------------------------------------------------------------------
# Death, signals, ranks that hang


def wait_for(condition, process=None, seconds: float = 300):
    begin = time.monotonic()
    while not condition():
        assert process is None or process.is_alive()
        assert time.monotonic() - begin < seconds
        time.sleep(0.02)


def has_step(folder: Path, step: int = 1) -> bool:
    log = folder / "run" / "log.jsonl"
    return log.exists() and f'"step": {step}, "loss"' in log.read_text()


def kill_itself(number: int, run):
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_ends_the_others_with_one_line(oracle, data_dir, tmp_path, rank):
    inject = partial(at_step, 7, partial(kill_itself, signal.SIGKILL), rank)
    processes = start_ranks(command(data_dir), tmp_path, 2, inject=inject)
    for process in processes:
        process.join(120)
    assert fired(tmp_path) and processes[rank].exitcode == -signal.SIGKILL
    assert processes[1 - rank].exitcode == 5
    err = (tmp_path / f"rank{1 - rank}.err").read_text()
    assert re.search(r"^train_gpt2.py: error: lost another rank: .*$", err, re.M)
    assert "Traceback" not in err
    goes_on(data_dir, tmp_path, oracle, 2)


def test_sigusr1_saves_and_stops(data_dir, tmp_path):
    inject = partial(at_step, 3, partial(kill_itself, signal.SIGUSR1), 0)
    code, out, _ = train(command(data_dir), tmp_path, inject=inject)
    assert fired(tmp_path) and code == 3 and "stopped by a signal after step 4" in out


def stop_second(rank: int):
    """Injection: the second rank stops after step 7."""
    at_step(7, partial(kill_itself, signal.SIGSTOP), 1, rank)


def stop_impatient(rank: int):
    train_gpt2.guard.Watchdog.GRACE_S = 2
    stop_second(rank)


@pytest.mark.slow
def test_a_signal_ends_a_rank_that_waits_for_another(oracle, data_dir, tmp_path):
    first, second = start_ranks(command(data_dir), tmp_path, 2, inject=stop_impatient)
    wait_for(lambda: fired(tmp_path), first)
    time.sleep(0.5)
    os.kill(first.pid, signal.SIGTERM)
    first.join(120)
    second.kill()
    second.join()
    assert first.exitcode == 5
    err = (tmp_path / "rank0.err").read_text()
    assert re.search(r"rank 0: no progress for 3 s after a signal in .* step", err)


def test_a_signal_in_a_save_finishes_it(oracle, data_dir, tmp_path):
    code, out, _ = train(command(data_dir), tmp_path, inject=signal_in_save)
    assert fired(tmp_path) and code == 3
    assert read_checkpoint(tmp_path / "run" / "checkpoint_000005.pt")["step"] == 5
    goes_on(data_dir, tmp_path, oracle)


def signal_in_save(rank: int):
    save = torch.save

    def save_and_signal(*args):
        if not fired(Path()):
            Path("fired").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        save(*args)

    torch.save = save_and_signal


@pytest.mark.slow
def test_a_second_signal_ends_at_once(oracle, data_dir, tmp_path):
    code, _, err = train(command(data_dir), tmp_path, inject=partial(at_step, 7, twice, 0))
    assert fired(tmp_path) and code == 130 and "--resume goes on from the last save" in err
    goes_on(data_dir, tmp_path, oracle)


def twice(run):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(2.2)
    os.kill(os.getpid(), signal.SIGINT)


PHASES = (
    "opening the data", "compiling and warming up", "validation", "micro-step 1/",
    "a sample",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_leaves_no_debris(oracle, data_dir, tmp_path, phase):
    line = command(data_dir, eval_every=2)
    code, _, err = train(line, tmp_path, inject=partial(signal_in_phase, phase))
    assert fired(tmp_path) and code in (3, 130) and len(err.splitlines()) <= 1
    for path in (tmp_path / "run").glob("*"):
        assert path.name in ("lock", "log.jsonl") or read_checkpoint(path)["step"] <= 3
    goes_on(data_dir, tmp_path, oracle)


def signal_in_phase(phase: str, rank: int):
    note = train_gpt2.guard.Watchdog.note

    def note_and_signal(self, now):
        note(self, now)
        if now.startswith(phase) and not fired(Path()):
            Path("fired").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    train_gpt2.guard.Watchdog.note = note_and_signal


def test_a_signal_that_python_ignores_is_not_lost(oracle, data_dir, tmp_path):
    """Python reports an exception in a callback of the garbage collector, and goes on."""
    code, _, err = train(command(data_dir), tmp_path, inject=signal_in_callback)
    assert fired(tmp_path) and "Exception ignored" in err and code == 3
    assert records(tmp_path / "run", "loss").keys() == {1}
    goes_on(data_dir, tmp_path, oracle)


def test_a_signal_while_a_step_waits_ends_the_run_after_that_step(oracle, data_dir, tmp_path):
    """On a GPU nearly all the time of a step is such a wait."""
    code, _, err = train(command(data_dir), tmp_path, inject=signal_in_wait)
    assert code == 3, err
    assert records(tmp_path / "run", "loss").keys() == {1, 2, 3}
    goes_on(data_dir, tmp_path, oracle)


def signal_in_wait(rank: int):
    add_up, calls = train_gpt2.World.sum, []

    def signal_and_add_up(self, values):
        calls.append(len(values))
        if sum(count > 1 for count in calls) == 3:  # one value: a validation
            os.kill(os.getpid(), signal.SIGTERM)
        return add_up(self, values)

    train_gpt2.World.sum = signal_and_add_up


def signal_in_callback(rank: int):
    log_start = train_gpt2.log_start

    def log_and_signal(*args):
        log_start(*args)
        watched = type("Watched", (), {})()
        _ref = weakref.ref(watched, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        Path("fired").touch()
        del watched

    train_gpt2.log_start = log_and_signal


def test_two_runs_never_share_a_folder(data_dir, tmp_path):
    [first] = start_ranks(command(data_dir, steps=5000), tmp_path / "one")
    wait_for(lambda: has_step(tmp_path / "one"), first)
    line = command(data_dir, steps=5000, out_dir=None)
    code, _, err = train([*line, "--out-dir", str(tmp_path / "one" / "run")], tmp_path / "two")
    assert code == 2 and f"is being written by process {first.pid} on " in err
    first.kill()
    first.join()
    line[line.index("--steps") + 1] = "3"
    code, _, err = train([*line, "--out-dir", str(tmp_path / "one" / "run")], tmp_path / "two")
    assert code == 0, err  # the system freed the lock


def raise_bug(run):
    raise KeyError("a bug")


def leave(run):
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("act", [raise_bug, leave])
def test_the_fault_of_one_rank_stops_all(oracle, data_dir, tmp_path, act):
    code, _, err = train(command(data_dir), tmp_path, 2, inject=partial(at_step, 7, act, 1))
    assert fired(tmp_path) and code == 5 and "lost another rank" in err
    if act is raise_bug:
        assert (tmp_path / "rank1.err").read_text().endswith("KeyError: 'a bug'\n")
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == ["checkpoint_000005.pt"]
    goes_on(data_dir, tmp_path, oracle, 2)


@pytest.mark.slow
@pytest.mark.parametrize("continues", [True, False])
def test_a_stopped_rank_is_waited_for_and_then_reported(oracle, data_dir, tmp_path, continues):
    line = command(data_dir, timeout_s=600 if continues else 10)
    first, second = start_ranks(line, tmp_path, 2, inject=stop_second)
    wait_for(lambda: fired(tmp_path), first)
    if continues:
        time.sleep(3)
        os.kill(second.pid, signal.SIGCONT)
        assert finish([first, second], tmp_path)[0] == 0
        return equal(tmp_path / "run", oracle[2])
    first.join(120)
    second.kill()
    second.join()
    err = (tmp_path / "rank0.err").read_text()
    assert first.exitcode == 5 and "rank 0: no progress for 11 s (--timeout-s) in micro-step" in err
    goes_on(data_dir, tmp_path, oracle, 2)


@pytest.mark.slow
def test_too_little_memory_is_named(oracle, data_dir, tmp_path):
    code, _, err = train(command(data_dir), tmp_path, inject=partial(at_step, 7, no_memory, 0))
    assert fired(tmp_path) and code == 2 and "lower --micro-batch-size" in err
    goes_on(data_dir, tmp_path, oracle)


def no_memory(run):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 24), resource.RLIM_INFINITY))
    torch.empty(1 << 28, dtype=torch.uint8)  # as much as a larger step would take


def test_a_signal_is_answered_at_once(data_dir, tmp_path):
    program = [sys.executable, train_gpt2.__file__, *command(data_dir, steps=5000)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=env)
    with process:
        wait_for(lambda: has_step(tmp_path))
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 3
        assert "finishing this step and saving it; again: end now\n" in process.stderr.read()


def test_a_closed_terminal_stops_nothing(oracle, data_dir, tmp_path):
    program = [sys.executable, train_gpt2.__file__, *command(data_dir, eval_every=1)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, env=env)
    process.stdout.readline()
    process.stdout.close()
    wait_for(lambda: has_step(tmp_path))
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0
    equal(tmp_path / "run", oracle[1])


@pytest.mark.slow
def test_a_poor_environment_is_enough(oracle, data_dir, tmp_path):
    program = (
        f"ulimit -n 32; exec {sys.executable} {train_gpt2.__file__} {' '.join(command(data_dir))}"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "HOME": "/proc/none", "TMPDIR": "/proc/none"}
    subprocess.run(["bash", "-c", program], cwd=tmp_path, env=env, check=True)
    equal(tmp_path / "run", oracle[1])


# --------------------------------------------------------------------------------------------------
# What is watched


@pytest.fixture(scope="session")
def watching(data_dir, tmp_path_factory) -> list[str]:
    """The command of a run that is watched often, in steps where it is saved."""
    often = {"steps": 6, "eval_every": 2, "save_every": 1}
    asked = {"hellaswag": questions(tmp_path_factory.mktemp("questions")), "sample_tokens": 9}
    return command(data_dir, **often | asked)


@pytest.fixture(scope="session")
def watched(watching, once) -> dict[int, Path]:
    """Folders of uninterrupted runs of it, on 1 and 2 ranks."""

    def make(folder: Path):
        for ranks in (1, 2):
            code, _, err = train(watching, folder / str(ranks), ranks)
            assert code == 0, err

    return {ranks: once("watched", make) / str(ranks) / "run" for ranks in (1, 2)}


def nothing_is_missing(out_dir: Path, whole: Path):
    """Each validation, sample and answer is there, to the bit."""
    steps = {"val_loss": [0, 2, 4, 6], "bits_per_byte": [0, 2, 4, 6], "sample": [2, 4, 6]}
    for name, due in (
        steps | {"hellaswag_acc": [2, 4, 6], "hellaswag_acc_norm_chars": [2, 4, 6]}
    ).items():
        assert records(out_dir, name) == records(whole, name), name
        assert sorted(records(out_dir, name)) == due
    assert bool(find_spec("matplotlib")) == (out_dir / "loss.png").exists()
    equal(out_dir, whole)


def signal_at_record(number: int, at: int, rank: int):
    """Injection: a signal comes when the log has got its nth record."""
    make_log, count = train_gpt2.log.make_log, itertools.count(1)

    def make(*args):
        log = make_log(*args)

        def log_and_signal(text, **record):
            log(text, **record)
            if rank == 0 and next(count) == at:
                os.kill(os.getpid(), number)

        return log_and_signal

    train_gpt2.log.make_log = make


@pytest.mark.parametrize(
    ("ranks", "number", "at"),
    [(1, signal.SIGTERM, 3), (2, signal.SIGTERM, 3), (1, signal.SIGKILL, 5)]
    + [pytest.param(ranks, signal.SIGKILL, at, marks=pytest.mark.slow)
       for ranks in (1, 2) for at in (5, 6, 7, 8) if (ranks, at) != (1, 5)],
)  # fmt: skip
def test_a_run_that_is_stopped_again_and_again_misses_no_validation(
    watched, watching, tmp_path, ranks, number, at
):
    """By the nth record of each process: the first three are of its start."""
    codes, inject = [], partial(signal_at_record, number, at)
    while 0 not in codes:
        codes.append(train(watching, tmp_path, ranks, inject=inject)[0])
        assert len(codes) < 40
    assert len(codes) > 3 and {*codes} == {0, 3 if number == signal.SIGTERM else -number}
    nothing_is_missing(tmp_path / "run", watched[ranks])
    code, out, err = train(watching, tmp_path, ranks)
    assert code == 0 and out.startswith("done: 6 steps in ")
    assert "already complete: --steps 6 are done" in err


def signal_while_watching(phase: str, ranks: set[int], rank: int):
    """Injection: after step 2 a signal comes in the first part of phase, on some ranks; what each
    notes next is kept."""
    note, state = train_gpt2.guard.Watchdog.note, ["before"]

    def note_and_signal(self, now):
        note(self, now)
        if state == ["signalled"]:
            Path(f"next{rank}").write_text(now)
            state[:] = ["over"]
        elif state == ["after step 2"] and now.startswith(phase):
            state[:] = ["signalled"]
            if rank in ranks:
                os.kill(os.getpid(), signal.SIGTERM)
        elif "of step 2" in now:
            state[:] = ["after step 2"]

    train_gpt2.guard.Watchdog.note = note_and_signal


@pytest.mark.parametrize(("ranks", "signalled"), [(1, {0}), (2, {0, 1}), (2, {1})])
@pytest.mark.parametrize(("phase", "step"), [("validation", 2), ("a sample", 2), ("multiple", 2)])
def test_a_stop_does_not_wait_for_what_is_watched(
    watched, watching, tmp_path, ranks, signalled, phase, step
):
    """It is saved at once, though no save was due, and the next process watches it."""
    line = [*watching, "--save-every", "0"]
    code, _, err = train(
        line, tmp_path, ranks, inject=partial(signal_while_watching, phase, signalled)
    )
    assert code == 3, err
    for rank in signalled:
        assert (tmp_path / f"next{rank}").read_text().startswith(("a save, once", "a comparison"))
    assert read_checkpoint(checkpoints(tmp_path / "run")[0])["step"] == step
    assert f'"stopped": {step}' in (tmp_path / "run" / "log.jsonl").read_text()
    train(line, tmp_path, ranks)
    nothing_is_missing(tmp_path / "run", watched[ranks])


def fail_at_the_end(rank_of: int, rank: int):
    """Injection: on one rank all that comes after the last save fails, each in its own way."""
    ended = []

    def failing(function, error, is_it=lambda *args: True):
        def fail(*args, **more):
            if ended and rank == rank_of and is_it(*args):
                raise error
            return function(*args, **more)

        return fail

    is_val = lambda loader, *args: loader.seed is None  # noqa: E731
    train_gpt2.ShardLoader.batch = failing(
        train_gpt2.ShardLoader.batch, OSError("no\nshard"), is_val
    )
    train_gpt2.text.stream = failing(train_gpt2.text.stream, torch.OutOfMemoryError("full"))
    train_gpt2.evaluate.choice_losses = failing(
        train_gpt2.evaluate.choice_losses, KeyError("a bug")
    )
    train_gpt2.log.draw_loss = failing(train_gpt2.log.draw_loss, PermissionError("no picture"))
    at_step(6, ended.append, rank_of, rank)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_what_fails_after_the_last_save_is_one_line_each(watched, watching, tmp_path, ranks, rank):
    """On all ranks, and no failure of the run: the next resume does it."""
    inject = partial(fail_at_the_end, rank)
    code, out, err = train(watching, tmp_path, ranks, inject=inject)
    assert code == 0 and err == "", err
    told = re.findall("^no (.*) after step 6: (.*)$", out, re.M)
    assert ("val_loss", "OSError: no shard") in told or rank == 1
    names = ["val_loss", "sample", "hellaswag_acc", "picture"]
    assert [name for name, _ in told] == names[: 4 if rank == 0 else 3]
    code, out, err = train(watching, tmp_path, ranks)
    assert code == 0, err
    nothing_is_missing(tmp_path / "run", watched[ranks])


def weights_that_overflow(rank: int):
    """Injection: they are finite, and saved, but what is computed from them is not."""
    save = train_gpt2.save

    def enlarge_and_save(run, wait):
        with torch.no_grad():
            for p in run.state.model.parameters():
                p.fill_(1e30)
        save(run, wait)

    train_gpt2.save = enlarge_and_save


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_overflow_are_no_traceback(watching, tmp_path, ranks):
    line = [*watching, "--save-every=0"]
    code, out, err = train(line, tmp_path, ranks, inject=weights_that_overflow)
    assert code == 0 and err == "", err
    assert "no sample after step 6: ValueError: the network's weights overflow: " in out
    assert list(records(tmp_path / "run", "hellaswag_acc")) == [2, 4, 6]
    assert (tmp_path / "run" / "loss.png").exists() == bool(find_spec("matplotlib"))
    code, out, err = train([*line, "--sample-only", "--out-dir=run"], tmp_path)
    assert code == 2 and re.fullmatch(".*error: the network's weights overflow.*\n", err)


class FullBoard:
    """Stands where TensorBoard's writer would: its disk is full after the first step."""

    def __init__(self, folder):
        self.folder = folder

    def add_scalar(self, name, value, step):
        if step:
            raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        pass


def full_board(rank: int):
    train_gpt2.log.tensorboard = lambda: FullBoard


def test_a_tensorboard_that_fails_costs_a_line(oracle, data_dir, tmp_path):
    code, out, err = train(command(data_dir, tensorboard=True), tmp_path, inject=full_board)
    assert code == 0 and out.count("no more for TensorBoard: OSError: [Errno 28]") == 1, err
    equal(tmp_path / "run", oracle[1])


NO_RECORDS = ["null", "[1]", "7", '"step"', '{"step": [6]}', '{"step": "6", "val_loss": 0.1}',
              '{"step": null, "val_loss": 0.1}', '{"val_loss": 0.1}', "[" * 10_000, "\x00",
              "9" * 5000, '{"step": 3, "val_loss": null, "loss": "x"}']  # fmt: skip


@pytest.mark.parametrize("lost", ["val_loss", "sample", "hellaswag_acc", "picture", "step"])
def test_a_finished_run_does_what_its_log_lacks(watched, watching, tmp_path, lost):
    """A line that is no record says nothing, and fails nothing."""
    out_dir = shutil.copytree(watched[1], tmp_path / "run")
    log = out_dir / "log.jsonl"
    kept = [line for line in log.read_text().splitlines() if f'"step": 6, "{lost}"' not in line]
    log.write_text("\n".join(NO_RECORDS + (kept if lost != "step" else []) + NO_RECORDS) + "\n")
    code, out, err = train(watching, tmp_path)
    assert code == 0 and "resumed after step 6" in out, err
    if lost != "step":
        nothing_is_missing(out_dir, watched[1])
    code, out, err = train(watching, tmp_path)
    assert code == 0 and out.startswith("done") and "already complete" in err
    shutil.copy(watched[1] / "log.jsonl", log)
    code, out, err = train([*watching, "--steps=8"], tmp_path)
    assert code == 0 and "validation after step 8" in out and "sample after step 6" not in out


# --------------------------------------------------------------------------------------------------
# Numbers


def bad_numbers(step: int, kind: str, on_rank: int, rank: int):
    """Injection: the loss of a step, or the gradient of one weight, is not finite."""
    forward, seen = train_gpt2.GPT.forward, []
    num_warm_up = 2 if "WORLD_SIZE" in os.environ else 1

    def broken(self, idx, targets):
        loss = forward(self, idx, targets)
        if rank == on_rank and self.training and torch.is_grad_enabled():
            seen.append(1)
            if (len(seen) - num_warm_up - 1) // 12 + 1 == step:  # 12 passes in one
                Path("fired").touch()
                weight = next(self.parameters()).flatten()[0]
                infinite = (weight - weight.detach()).sqrt()  # 0, its gradient is not
                return loss * torch.nan if kind == "loss" else loss + infinite
        return loss

    train_gpt2.GPT.forward = broken


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_nothing_that_is_not_finite_enters_the_weights(oracle, data_dir, tmp_path, kind):
    inject = partial(bad_numbers, 4, kind, 1)
    code, _, err = train(command(data_dir, save_every=1), tmp_path, 2, inject=inject)
    assert fired(tmp_path) and code == 4
    rank = "1" if kind == "loss" else "none alone"
    assert re.search(rf"step \d+ gave loss .* \(rank: {rank}\) .*on sequences [\d,]+ to", err)
    goes_on(data_dir, tmp_path, oracle, 2)


def change_a_weight(run):
    with torch.no_grad():
        next(run.state.model.parameters()).flatten()[0] += 1e-3


def test_a_rank_with_other_weights_is_named_and_nothing_saved(oracle, data_dir, tmp_path):
    inject = partial(at_step, 6, change_a_weight, 1)
    code, _, err = train(command(data_dir), tmp_path, 2, inject=inject)
    assert fired(tmp_path) and code == 4
    assert "after step 10 rank 1 holds other weights than the others" in err
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == ["checkpoint_000005.pt"]
    goes_on(data_dir, tmp_path, oracle, 2)


def other_flags(rank: int):
    parse_args = train_gpt2.parse_args
    if rank == 1:
        train_gpt2.parse_args = lambda argv, *how: parse_args([*argv, "--weight-decay=0.3"], *how)


def other_data(rank: int):
    if rank == 1:
        train_gpt2.TokenFolder.fingerprint = "other"


@pytest.mark.parametrize(("inject", "word"), [
    (other_flags, "--weight-decay is 0.3 on rank 1 and 0.1 on rank 0"),
    (other_data, "the data is other on rank 1"),
])  # fmt: skip
def test_ranks_that_disagree_do_not_start(data_dir, tmp_path, inject, word):
    code, _, err = train(command(data_dir), tmp_path, 2, inject=inject)
    assert code == 2 and word in err and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def elsewhere(folder: Path, rank: int):
    if rank == 1:
        os.chdir(folder)


@pytest.mark.parametrize("what", ["other", "missing", "other training data"])
def test_ranks_whose_machines_hold_other_data_do_not_start(data_dir, tmp_path, what):
    """Each looks at its own."""
    for name in ("main", "other"):
        shutil.copytree(data_dir, tmp_path / name / "tokens")
    other = tmp_path / "other" / "tokens"
    if what == "missing":
        shutil.rmtree(other)
    elif what == "other":
        shutil.rmtree(other)
        text = str(data_dir.parent / "text.jsonl")
        prepare_data.main(["--data-dir", str(other), "--input", text, "--seed", "7"])
    else:
        (other / "manifest.json").unlink()
        shards = sorted(other.glob("train*.bin"))
        shards[0].write_bytes(shards[1].read_bytes())
    inject = partial(elsewhere, tmp_path / "other")
    line = command("tokens", out_dir=tmp_path / "run")
    code, _, err = train(line, tmp_path / "main", 2, inject=inject)
    assert code == 2 and "the data is " in err and " on rank 1 and " in err, err
    assert not (tmp_path / "run").exists()


def test_ranks_that_can_not_meet_say_where(data_dir, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(taken.getsockname()[1])}  # fmt: skip
        program = [sys.executable, train_gpt2.__file__, *command(data_dir)]
        done = subprocess.run(
            program, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
        )
    assert done.returncode == 2
    assert re.search(
        r"^train_gpt2.py: error: the ranks can't meet at MASTER_ADDR=127", done.stderr, re.M
    )


# --------------------------------------------------------------------------------------------------
# As torchrun starts it


def torchrun(folder: Path, data_dir: Path, *options: str, **changes) -> subprocess.Popen:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = [*program, *options, train_gpt2.__file__, *command(data_dir, **changes)]
    return subprocess.Popen(line, cwd=folder, stderr=subprocess.DEVNULL, start_new_session=True)


def workers(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def is_free(folder: Path) -> bool:
    try:
        files.locked(folder).close()
        return True
    except BlockingIOError:
        return False


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_the_ranks_of_a_torchrun_that_is_killed_end(oracle, data_dir, tmp_path, number):
    launcher = torchrun(tmp_path, data_dir, steps=100_000)
    wait_for(lambda: has_step(tmp_path))
    ranks = workers(launcher)
    launcher.send_signal(number)
    launcher.wait()
    wait_for(lambda: not any(map(lives, ranks)), seconds=60)
    assert len(ranks) >= 2
    wait_for(lambda: is_free(tmp_path / "run"), seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0, 0.1, 0.3, 0.6, 1, 1.5, 2, 3, 4])
def test_the_ranks_of_a_torchrun_that_is_killed_early_end(data_dir, tmp_path, after_s):
    """Also before they have imported torch, and know that they are ranks."""
    launcher = torchrun(tmp_path, data_dir, steps=100_000)
    wait_for(lambda: ranks_of(launcher))
    time.sleep(after_s)
    ranks = ranks_of(launcher)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(lives, ranks)), seconds=60)
    assert len(ranks) == 2
    wait_for(lambda: not (tmp_path / "run").exists() or is_free(tmp_path / "run"), seconds=60)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Those that run the program already."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workers(launcher)}
    found = [pid for pid, line in lines.items() if train_gpt2.__file__.encode() in line]
    return found if len(found) == 2 else []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_passes_a_signal_on_and_the_run_goes_on(oracle, data_dir, tmp_path, number):
    option = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"  # as in the README
    launcher = torchrun(tmp_path, data_dir, option, steps=100_000)
    wait_for(lambda: has_step(tmp_path))
    launcher.send_signal(number)
    launcher.wait(120)
    last = max(records(tmp_path / "run", "loss"))
    assert read_checkpoint(checkpoints(tmp_path / "run")[0])["step"] == last


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_without_help(oracle, data_dir, tmp_path):
    launcher = torchrun(tmp_path, data_dir, "--max-restarts=10", save_every=1, steps=160)
    for step in (3, 60):
        wait_for(lambda step=step: has_step(tmp_path, step))
        os.kill(workers(launcher)[-1], signal.SIGKILL)
        wait_for(lambda step=step: (tmp_path / "run/log.jsonl").read_text().count('"resumed"') >
                 (step > 3))  # fmt: skip
    assert launcher.wait(600) == 0
    assert list(records(tmp_path / "run", "loss")) == list(range(1, 161))


# --------------------------------------------------------------------------------------------------
# Exactness


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["one after the other", *(range(n, 20, 5) for n in range(1, 6))])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_saved_and_resumed_after_every_step_is_the_uninterrupted_one(
    data_dir, once, tmp_path, ranks, steps
):
    """20 steps over three epochs of shards of a prime length: one chain of 19 kills, and from the
    checkpoint of each step to the end."""
    size = {"steps": 20, "batch_tokens": 384}
    line = command(data_dir, **size, save_every=1, keep=40)

    def make(folder: Path):
        assert train(line, folder, ranks)[0] == 0

    whole = once(f"20-steps-on-{ranks}", make) / "run"
    if steps == "one after the other":
        for step in range(1, 20):
            code = train(line, tmp_path, ranks, kill_after=step + 1)[0]
            assert code not in range(8)
        assert train(line, tmp_path, ranks)[0] == 0
        return equal(tmp_path / "run", whole)
    for step in steps:
        folder = tmp_path / str(step)
        (folder / "run").mkdir(parents=True)
        name = f"checkpoint_{step:06d}.pt"
        shutil.copy(whole / name, folder / "run" / name)
        code = train(command(data_dir, **size), folder, ranks)[0]
        assert code == 0 and digest(folder / "run") == digest(whole)


# --------------------------------------------------------------------------------------------------
# Data


def overwrite_shards(how: str, data: Path, run):
    for path in data.glob("train*.bin"):
        content = path.read_bytes()
        if how == "replaced by a link to nothing":
            path.unlink()
            path.symlink_to("/nowhere")
        else:
            path.write_bytes(content[:1100] if how == "cut" else content[:1024] + bytes(2018))


@pytest.mark.parametrize("how", ["cut", "written over", "replaced by a link to nothing"])
def test_a_shard_that_changes_in_the_run_ends_it_with_its_name(data_dir, tmp_path, how):
    data = shutil.copytree(data_dir, tmp_path / "data")
    inject = partial(at_step, 3, partial(overwrite_shards, how, data), 0)
    code, _, err = train(command(data), tmp_path, inject=inject)
    assert fired(tmp_path) and code == 6 and "train_00000" in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_crash_at_every_operation_of_preparing_costs_nothing(
    tmp_path, monkeypatch, capsys, record_property
):
    """After each crash the same command makes the folder that an undisturbed one made; a crash as
    the last thing of all leaves the lock's file in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "PIECE", 500)
    rng = np.random.default_rng(3)
    words = [bytes(rng.integers(97, 123, 5, np.uint8)).decode() for _ in range(50)]
    texts = [" ".join(rng.choice(words, 80)) for _ in range(10)]
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = ["--input", "text.jsonl", "--val-fraction", "0.3", "--workers", "0", "--data-dir"]

    def prepare(name: str):
        config = prepare_data.parse_args([*line, name])
        prepare_data.prepare(replace(config, shard_tokens=1009))

    def content(name: str) -> dict[str, bytes]:
        return {f.name: f.read_bytes() for f in Path(name).iterdir() if f.name != "lock"}

    prepare("whole")
    for at in itertools.count(1):
        shutil.rmtree("crashed", ignore_errors=True)
        code = in_child(partial(prepare, "crashed"), Crash(at))
        if not Path("crashed").exists():
            prepare("crashed")
            assert "begins again" not in capsys.readouterr().err
        assert content("crashed") == content("whole"), at
        assert not Path("crashed.unfinished").exists()
        if code == 0:
            break
        assert code == 137
    found = f"{at - 1} of preparing {len(content('whole')) - 1} shards"
    record_property("crash points", found)
    assert at > 80


@pytest.mark.slow
def test_the_soak_finds_nothing_lost(tmp_path, monkeypatch):
    """For an hour, and with longer runs: python tests/soak.py --minutes 60."""
    import soak

    monkeypatch.setattr(soak, "STEPS", 120)
    counts = soak.soak(0.3, [2], 5, tmp_path, report=print)
    assert counts["runs"] >= 1 and counts["cycles"] > counts["runs"]
    assert not counts["runs that differ"]


# --------------------------------------------------------------------------------------------------
# The matrix itself


def test_nothing_in_the_programs_could_run_what_a_file_holds():
    root = Path(train_gpt2.__file__).parent
    for path in [*root.glob("*.py"), *root.glob("support/*.py")]:
        assert not re.search(r"pickle|exec\(|eval\(", path.read_text(encoding="utf-8")), path


def test_every_row_of_the_matrix_has_a_test_or_a_reason():
    rows = matrix()
    assert list(rows) == [f"F{n:02d}" for n in range(1, 99)]
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    for row, (injected, tests) in rows.items():
        assert injected and tests, row
        for name in tests:
            assert f"def {name}(" in written or injected.startswith("does not apply"), name
