"""A run that was killed, damaged or moved goes on to the bits of one that nothing happened to."""

import errno
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    at,
    digest,
    equal,
    flip,
    large_scale,
    losses,
    raise_error,
    records,
    refused,
    saved_state,
    send,
    snapshot,
    start_ranks,
    train,
    wait_for,
)

import train_gpt2
from support.checkpoint import checkpoints
from support.cli import spell

resource = pytest.importorskip("resource")  # POSIX has it
slow = pytest.mark.slow
KILLED = -signal.SIGKILL


# ---- Exact resume --------------------------------------------------------------------------------


LINES = ["--no-flash --n-layer=3 --dropout=0.1", "--no-muon --no-fused --no-shuffle", "--fp16"]
LINES += ["--recompute --loss-chunk-tokens=5 --no-pad-vocab", "--bf16 --bf16-residual"]


def copies(rank: int):
    """Injection: what a SIGKILL after each step would leave in the folder is copied."""
    log_step = train_gpt2.log_step

    def log_and_copy(run, *args):
        log_step(run, *args)
        if rank == 0:
            shutil.copytree("run", f"killed{run.step}/run")

    train_gpt2.log_step = log_and_copy
    large_scale(rank)


def kills() -> list:
    """Ranks, flags, and the steps after which a run is killed; 20 steps are three epochs."""
    few = [(1, LINES[0], (1, 13)), (2, LINES[0], (8,))]
    some = 1, 2, 7, 13, 19
    many = [(ranks, LINES[0], range(1, 21)) for ranks in (1, 2)]
    many += [(ranks, line, some) for ranks in (1, 2) for line in LINES[1:]]
    many += [(ranks, line, some) for ranks in (3, 4) for line in LINES[:2]]
    return few + [pytest.param(*each, marks=slow) for each in many]


@pytest.mark.parametrize(("ranks", "line", "steps"), kills())
def test_killed_after_any_step(trial, once, ranks, line, steps):
    changes = {"save_every": 2, "steps": 20, "batch_tokens": 384, "num_samples": 0}
    command = trial.command(*line.split(), data_dir=trial.data, **changes)

    def make(folder: Path):
        code, _, err = train(command, folder, ranks, inject=copies)
        assert code == 0, err

    made = once(f"killed {line} on {ranks}", make)
    for step in steps:
        folder = shutil.copytree(made / f"killed{step}", trial.folder / str(step))
        code, out, err = train(command, folder, ranks, inject=large_scale)
        saved = (step - 1) // 2 * 2
        assert code == 0 and (f"after step {saved}\n" if saved else "run: run, new\n") in out, err
        assert "not bit for bit" not in out
        equal(folder / "run", made / "run")
        if "fp16" in line:
            states = [saved_state(folder / "run"), saved_state(made / "run")]
            assert states[0]["scaler"] == states[1]["scaler"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_other_ranks_and_micro_batches(trial, ranks):
    assert trial.train(3 - ranks, kill_after=7)[0] == KILLED
    code, out, err = trial.train(ranks, micro_batch_size=1)
    assert code == 0 and "after step 5" in out, err
    changed = [text for text in out.splitlines() if "not bit for bit" in text]
    assert len(changed) == 2 and "micro" in changed[0] and "ranks" in changed[1]
    assert losses(trial.out_dir) == pytest.approx(losses(trial.whole[1]), rel=1e-6)


def test_flags_of_a_resume(trial):
    changes = {"learning_rate": 3e-3, "dropout": 0.1, "flash": False}
    for name, kill_after in (("whole", None), ("run", 7)):
        trial.train(kill_after=kill_after, out_dir=name, **changes)
    log = trial.log.read_bytes()  # it is never read, and neither is config.json
    trial.log.write_bytes(log.replace(b'"learning_rate": 0.003', b'"learning_rate": 0.05', 1))
    (trial.out_dir / "config.json").unlink()
    code, out, err = train(["--resume", "--out-dir=run"], trial.folder)
    assert code == 0 and "changed" not in out, err
    assert digest(trial.out_dir) == digest(trial.folder / "whole")
    changed = {"steps": 13, "learning_rate": 0.5, "weight_decay": 0.7, "schedule": "constant"}
    line = [f"{spell(name)}={value}" for name, value in changed.items()]
    code, out, err = train(["--resume", "--out-dir=run", *line], trial.folder)
    assert code == 0 and "not bit for bit" not in out, err
    for name, value in changed.items():
        assert f"{name} {value}" in out
    assert records(trial.out_dir, "learning_rate")[13] == 0.5
    assert saved_state(trial.out_dir)["flags"]["weight_decay"] == 0.7


def test_config_repeats_a_run(trial):
    changes = {"dropout": 0.1, "muon": False, "learning_rate": 3e-3}
    trial.train(**changes)
    line = ["--config", "run/config.json", "--out-dir"]
    assert train([*line, "again"], trial.folder)[0] == 0
    equal(trial.folder / "again", trial.out_dir)
    assert train([*line, "other", "--seed=7"], trial.folder)[0] == 0
    assert losses(trial.folder / "other")[1] != losses(trial.out_dir)[1]
    config = json.loads((trial.folder / "other/config.json").read_bytes())
    assert config["seed"] == 7 and config["dropout"] == 0.1


@slow
def test_finetuned_run_without_its_source(trial):
    source = shutil.copytree(trial.whole[1], trial.folder / "source")
    changes = {"init_from": "source", **dict.fromkeys(("model", "n_layer", "n_head", "n_embd"))}
    line = trial.command(**changes)
    whole = trial.folder / "uninterrupted"
    for folder in ("data", "source"):
        shutil.copytree(trial.folder / folder, whole / folder)
    assert train(line, whole)[0] == 0
    assert train(line, trial.folder, kill_after=7)[0] == KILLED
    shutil.rmtree(source)
    code, _, err = train(line, trial.folder)
    assert code == 0, err
    equal(trial.out_dir, whole / "run")


@pytest.mark.parametrize("how", ["moved", "other"])
def test_data_moved_or_changed(trial, how):
    trial.train(kill_after=7)
    other = (trial.folder / "data").rename(trial.folder / "elsewhere")
    if how == "other":
        manifest = json.loads((other / "manifest.json").read_bytes())
        manifest["train"]["shards"].reverse()
        (other / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = train(["--resume", "--out-dir=run", "--data-dir=elsewhere"], trial.folder)
    if how == "moved":
        assert code == 0, err
        equal(trial.out_dir, trial.whole[1])
    else:
        assert code == 2 and "--data-dir elsewhere" in err and trial.saved() == [5]


# ---- --resume, --auto-resume, and what they refuse -----------------------------------------------


def test_resume_and_auto_resume(trial, capfd, monkeypatch):
    monkeypatch.chdir(trial.folder)
    assert "--out-dir" in refused(["--resume"], capfd)
    assert "--out-dir" in refused(["--auto-resume"], capfd)
    line = trial.command(auto_resume=None)
    for name in ("run", "empty", "typo/run"):
        assert name in refused([*line, "--resume", "--out-dir", name], capfd)
        Path("empty").mkdir(exist_ok=True)
    assert not trial.out_dir.exists()
    code, out, _ = trial.train(steps=3)
    assert code == 0 and "run: run, new" in out
    assert "--resume" in refused(line, capfd)  # which would begin a second run there
    code, out, _ = train([*line, "--resume", "--steps=5"], trial.folder)
    assert code == 0 and "after step 3" in out
    trial.log.unlink()  # which is never read
    code, out, _ = trial.train()
    assert code == 0 and "after step 5" in out
    before = digest(trial.out_dir)
    for steps in (12, 9):  # as a repeated cell of a notebook does
        code, out, err = trial.train(steps=steps)
        assert code == 0 and "done: 12 steps" in out, err
    assert digest(trial.out_dir) == before
    assert "--config" in refused([*line, "--resume", "--config=run/config.json"], capfd)


def test_killed_in_the_last_evaluation(trial):
    assert trial.train(inject=at("evaluate.validate", 2, send, signal.SIGKILL))[0] == KILLED
    assert trial.saved() == [12, 10] and 12 not in records(trial.out_dir, "val_loss")
    out, _ = trial.goes_on()
    assert "step 12/12" not in out


# ---- Faults that end a run and cost no checkpoint ------------------------------------------------


def bad_loss(run, *_):
    run.model.register_forward_hook(lambda model, args, loss: loss * torch.nan)


def bad_gradient(run, *_):
    next(run.model.parameters()).register_hook(lambda grad: grad * torch.inf)


def change_a_weight(run, *_):
    with torch.no_grad():
        next(run.model.parameters()).flatten()[0] += 1e-3


def limit(size: int, *_):
    """A disk on which no file can be larger: 0 stands for the size that the log has now."""
    size = size or Path("run/log.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def break_shards(how: str, *_):
    for path in Path("data").glob("train*.bin"):
        data = path.read_bytes()
        path.write_bytes(data[:1100] if how == "cut" else data[:1024] + b"\xff" * 2018)


NO_MEMORY, IO_ERROR = torch.OutOfMemoryError("out of memory"), OSError(errno.EIO, "I/O error")


FAULTS = {  # injection, ranks, words in its one line ("": a traceback), checkpoints that are left
    "nan": (at("train_step", 4, bad_loss, on_rank=1), 2, "step 3 is saved", [3]),
    "inf": (at("train_step", 4, bad_gradient), 1, "step 3 is saved", [3]),
    "nan at first": (at("train_step", 1, bad_loss), 1, "step 0 is saved", [0]),
    "weights": (at("log_step", 6, change_a_weight, on_rank=1), 2, "the weights of rank 1", [5]),
    "full in the moments": (at("checkpoint.save", 2, limit, 100_000), 1, "step_000010", [5]),
    "full in the log": (at("log_step", 7, limit, 0), 1, "too large", [5]),
    "rotation": (at("checkpoint.rotate", 2, raise_error, IO_ERROR), 1, "I/O error", [10, 5]),
    "cut shards": (at("log_step", 3, break_shards, "cut"), 1, "train_0000", []),
    "other shards": (at("log_step", 3, break_shards, "other"), 1, "65535", []),
    "no memory": (at("train_step", 7, raise_error, NO_MEMORY, on_rank=1), 2, "", [5]),
    "rank 0 dies": (at("log_step", 7, send, signal.SIGKILL), 2, "", [5]),
}
SLOW = "weights", "full in the moments", "rotation", "other shards", "no memory", "rank 0 dies"


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=slow if name in SLOW else ()) for name in FAULTS]
)
def test_faults(trial, fault):
    inject, ranks, words, saved = FAULTS[fault]
    codes, errors = trial.ends(trial.command(), ranks, inject)
    assert {*codes} <= {1, KILLED} and words in "".join(errors), errors
    if words:  # and the other rank, which torchrun would end, may show how it lost this one
        assert any(len(err.splitlines()) == 1 and words in err for err in errors), errors
        assert ranks == 1 or "log" in fault or errors[1] == "", errors
    assert trial.saved() == saved and not [*trial.out_dir.glob("*.tmp")]
    if fault != "nan at first":  # which is an edit of the network
        trial.goes_on(ranks)


# ---- Files of a checkpoint, and what is beside it ------------------------------------------------


def test_damaged_checkpoint(trial):
    """A run goes on from the one before."""
    (checkpoints(trial.copy_whole())[0] / "training.safetensors").unlink()
    out, err = trial.goes_on()
    assert "after step 10\n" in out and "step_000012" in err and "training.safetensors" in err


def test_all_checkpoints_damaged(trial):
    for path in checkpoints(trial.copy_whole()):
        flip(path / "model.safetensors", 99_999)
    before = snapshot(trial.out_dir)
    for changes in ({}, {"auto_resume": None, "resume": True}):
        code, _, err = trial.train(steps=20, **changes)
        assert code == 1 and snapshot(trial.out_dir) == before
        assert all(path.name in err for path in checkpoints(trial.out_dir)), err
        assert len(err.splitlines()) == 3  # one for each checkpoint before


def test_files_of_the_user_stay(trial):
    out_dir, mine = trial.copy_whole(), ("notes.tmp", "step_best", "step_12", "step_000099.pt")
    shutil.rmtree(out_dir / "step_000012")
    shutil.copytree(out_dir / "step_000010", out_dir / "step_000012.tmp")
    (out_dir / "step_000077").symlink_to("/nowhere")
    for name in mine:
        (out_dir / name).write_text("mine")
    code, _, err = trial.train()
    assert code == 0 and not [*out_dir.glob("step_0*.tmp")], err
    (out_dir / "step_000077").unlink()
    equal(out_dir, trial.whole[1])
    assert all((out_dir / name).read_text() == "mine" for name in mine)


def test_newest_and_best_are_kept(trial):
    """The last validation of a run that is extended was due because it was the last."""
    changes = {"save_every": 1, "eval_every": 3}
    assert trial.train(steps=5, **changes)[0] == 0
    assert trial.saved()[:2] == [5, 4]
    assert trial.train(steps=8, learning_rate=5, **changes)[0] == 0
    by_step = records(trial.out_dir, "val_loss")
    assert min(by_step, key=by_step.get) == 5 and trial.saved() == [8, 7, 5]
    assert trial.train(steps=12, eval_tokens=0, keep=3, **changes)[0] == 0
    assert trial.saved() == [12, 11, 10, 5]


# ---- Other machines, other runs -----------------------------------------------------------------


def other_machine(what: str, rank: int):
    """Injection: the second rank is on a machine with a disk of its own."""
    if rank == 0:
        return
    Path("other").mkdir()
    shutil.copytree("data", "other/data")
    if what == "other data":
        manifest = Path("other/data/manifest.json")
        manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0', 1))
    if what != "no checkpoint":
        shutil.copytree("run", "other/run")
    if what == "no data":
        shutil.rmtree("other/data")
    os.chdir("other")


@pytest.mark.parametrize("what", ["no checkpoint", "other data", "no data"])
def test_machines_with_other_files(trial, what):
    trial.copy_whole(2)
    line = trial.command("--resume", auto_resume=None, steps=20)
    codes, errors = trial.ends(line, 2, partial(other_machine, what))
    assert {*codes} <= {1, 2}
    [err] = errors[0].splitlines()
    assert "rank 1" in err and len(err) < 300, err
    assert trial.saved() == [12, 10]


def test_folder_of_a_live_run(trial):
    [first] = start_ranks(trial.command(steps=5000), trial.folder)
    wait_for(lambda: trial.log.exists() and '"loss"' in trial.log.read_text())
    for line in (trial.command(auto_resume=None), trial.command()):
        line = [*line, "--steps=3", "--out-dir", str(trial.out_dir), "--data-dir", str(trial.data)]
        code, _, err = train(line, trial.folder / "two")
        assert code == 2 and "live" in err and len(err.splitlines()) == 1
    first.kill()
    first.join()
    code, _, err = train(line, trial.folder / "two")
    assert code == 0, err
