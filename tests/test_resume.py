"""A run that was killed, damaged or moved goes on to the bits of one that nothing happened to."""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from conftest import (
    at,
    at_file_operation,
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
from safetensors import SafetensorError
from test_checkpoint import is_whole
from test_checkpoint import saved as save

import train_gpt2
from config import TrainConfig
from support.checkpoint import checkpoints, newest
from support.cli import RunError, spell

resource = pytest.importorskip("resource")  # POSIX has it
slow = pytest.mark.slow
KILLED = -signal.SIGKILL


# ---- Exact resume --------------------------------------------------------------------------------


def test_killed_ranks_go_on_to_the_same_bits(trial):
    assert trial.train(2, kill_after=7, save_every=3)[0] == KILLED
    out, _ = trial.goes_on(2, save_every=3)
    assert "after step 6" in out and "not bit for bit" not in out


LINES = {  # the relative difference that ranks and micro-batches may make, without dropout
    "": 1e-6,
    "--no-muon": 1e-6,
    "--no-flash --n-layer=3": 1e-6,  # of three matrices two ranks take two and one
    "--recompute --loss-chunk-tokens=5": 1e-6,
    "--no-pad-vocab --no-fused --no-shuffle --schedule=constant": 1e-6,
    "--fp16": 1e-2,
    "--bf16 --bf16-residual": 2e-2,
}


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
    few = [(1, "--dropout=0.1", (1, 2, 7, 13, 20)), (2, "--dropout=0.1", (8,))]
    few += [(1, line, (8,)) for line in LINES if line] + [(2, "--no-flash --n-layer=3", (19,))]
    lines = ["--dropout=0.1", "--no-muon --dropout=0.1", *LINES]
    many = [(ranks, line, range(1, 21)) for ranks in (1, 2) for line in lines]
    many += [(ranks, line, range(1, 21, 3)) for ranks in (3, 4) for line in lines[:4]]
    return few + [pytest.param(*each, marks=slow) for each in many]


@pytest.mark.parametrize(("ranks", "line", "steps"), kills())
def test_a_run_killed_after_any_step_goes_on_to_the_same_bits(trial, once, ranks, line, steps):
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
            assert 2 < states[0]["scaler"]["_growth_tracker"] < 18


# Other objects in each process; what a scaler begins with, which only its first step reads.
VOLATILE = ("lock", "log", "old_end", "_init_scale", "_init_growth_tracker")
# Any other flag is switched on, so that state which somebody adds with it is not forgotten.
KNOWN = """
model out_dir resume auto_resume init_from seed save_every keep device max_hours
deterministic data_dir shuffle seq_len batch_tokens eval_tokens n_layer n_head n_embd
dropout steps warmup_steps learning_rate schedule decay_to decay_share weight_decay
grad_clip beta1 muon eval_every log_every hellaswag wandb num_samples sample_tokens
prompt temperature top_k tf32 bf16 compile flash pad_vocab fused bf16_residual fp16
micro_batch_size recompute loss_chunk_tokens
"""
NO_STATE = (ModuleType, FunctionType, type)


def walk(value, path: str, found: dict[str, str], seen: list):
    """Note all numbers, texts and tensors that can be reached from value, by their paths."""
    if isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().float().numpy() if isinstance(value, torch.Tensor) else value
        found[path] = f"{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    elif value is None or isinstance(value, str | int | float | range | Path):
        found[path] = repr(value)
    elif not isinstance(value, NO_STATE) and not any(value is other for other in seen):
        seen.append(value)
        items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        if isinstance(value, list | tuple | set):
            items = dict(enumerate(value))
        for i, (key, below) in enumerate(items.items()):
            name = key if isinstance(key, str) else i  # a parameter, or an id
            if name not in VOLATILE:
                walk(below, f"{path}/{name}", found, seen)


def note_state(forgotten: str, rank: int):
    """Injection: write down after step 8 all that a Run holds. A part of the state is forgotten."""
    large_scale(rank)
    log_step, restore = train_gpt2.log_step, train_gpt2.Run.restore

    def log_and_note(run, *args):
        log_step(run, *args)
        if run.step == 8:
            found = {}
            walk(vars(run), "", found, [])
            Path("found.json").write_text(json.dumps(found))

    def restore_less(run, state: dict):
        own = run.state()
        restore(run, {name: (own if name == forgotten else state)[name] for name in state})

    train_gpt2.log_step, train_gpt2.Run.restore = log_and_note, restore_less


def test_a_resumed_run_holds_all_that_an_uninterrupted_one_does_and_what_is_forgotten_shows(trial):
    line = trial.command("--fp16", data_dir=trial.data, eval_every=3, save_every=1)
    for f in fields(TrainConfig):
        if f.name not in KNOWN.split():
            value = {"bool": not f.default, "float": 0.5, "int": 2}.get(f.type.__name__)
            line += spell(f.name, value).split() if value is not None else []
    assert train(line, trial.folder / "whole", inject=partial(note_state, ""))[0] == 0
    expected = json.loads((trial.folder / "whole/found.json").read_text())
    for part in ("/step", "/loader/position", "/val_losses/1", "/scaler/_scale", "/net/_"):
        assert any(path.startswith(part) for path in expected), part
    assert len(expected) > 300
    assert train(line, trial.folder / "killed", kill_after=7, inject=large_scale)[0] == KILLED
    unused = {"flags", "data"}  # which start() has used
    for forgotten in ("", *(saved_state(trial.folder / "killed/run").keys() - unused)):
        folder = shutil.copytree(trial.folder / "killed", trial.folder / f"less {forgotten}")
        code, _, err = train(line, folder, inject=partial(note_state, forgotten))
        assert code == 0, err
        found = json.loads((folder / "found.json").read_text())
        assert (found == expected) == (not forgotten), (
            forgotten,
            [path for path in expected if found.get(path) != expected[path]],
        )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("line", ["", *(pytest.param(line, marks=slow) for line in LINES if line)])
def test_other_ranks_and_micro_batches_go_on_within_rounding(trial, line, ranks):
    command = trial.command(*line.split(), data_dir=trial.data)
    assert train(command, trial.folder / "one")[0] == 0
    assert train(command, trial.folder, 3 - ranks, kill_after=7)[0] == KILLED
    code, out, err = train([*command, "--micro-batch-size=1"], trial.folder, ranks)
    assert code == 0 and "after step 5" in out, err
    changed = [text for text in out.splitlines() if "not bit for bit" in text]
    assert len(changed) == 2 and "micro" in changed[0] and "ranks" in changed[1]
    one = losses(trial.folder / "one/run")
    assert losses(trial.out_dir) == pytest.approx(one, rel=LINES[line])


def test_a_resume_needs_no_flag_again_and_says_of_each_what_changed(trial):
    changes = {"learning_rate": 3e-3, "dropout": 0.1, "flash": False}
    for name, kill_after in (("whole", None), ("run", 7)):
        trial.train(kill_after=kill_after, out_dir=name, **changes)
    trial.log.unlink()
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


def test_weight_decay_of_a_resume_is_the_new_one(trial):
    trial.train(steps=5)
    ends = []
    for decay in (0.0, 0.9):
        folder = shutil.copytree(trial.folder, trial.folder.with_name(f"{decay} {os.getpid()}"))
        line = ["--resume", "--out-dir=run", "--steps=8", f"--weight-decay={decay}"]
        assert train(line, folder)[0] == 0
        ends.append(losses(folder / "run"))
    assert ends[0][6] == ends[1][6] and ends[0][8] != ends[1][8]


def test_config_repeats_a_run_to_the_bit_and_a_typed_seed_makes_another(trial):
    changes = {"dropout": 0.1, "muon": False, "learning_rate": 3e-3}
    trial.train(**changes)
    line = ["--config", "run/config.json", "--out-dir"]
    assert train([*line, "again"], trial.folder)[0] == 0
    equal(trial.folder / "again", trial.out_dir)
    assert train([*line, "other", "--seed=7"], trial.folder)[0] == 0
    assert losses(trial.folder / "other")[1] != losses(trial.out_dir)[1]
    config = json.loads((trial.folder / "other/config.json").read_bytes())
    assert config["seed"] == 7 and config["dropout"] == 0.1
    (trial.folder / "few.json").write_text('{"seed": 7}')
    line = trial.command("--config=few.json", auto_resume=None, out_dir="few", **changes)
    assert train(line, trial.folder)[0] == 0
    equal(trial.folder / "few", trial.folder / "other")


def test_a_finetuned_run_goes_on_without_its_source(trial):
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
def test_data_may_move_but_not_change(trial, how):
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


def test_resume_continues_and_auto_resume_begins_or_continues(trial, capfd, monkeypatch):
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
    code, out, _ = trial.train()
    assert code == 0 and "after step 5" in out
    before = digest(trial.out_dir)
    for steps in (12, 9):  # as a repeated cell of a notebook does
        code, out, err = trial.train(steps=steps)
        assert code == 0 and "done: 12 steps" in out, err
    assert digest(trial.out_dir) == before
    assert "--config" in refused([*line, "--resume", "--config=run/config.json"], capfd)


def test_a_run_killed_before_its_first_save_begins_again(trial):
    trial.train(kill_after=2)
    assert trial.saved() == [] and trial.log.exists()
    trial.goes_on()


def test_a_run_killed_in_its_last_evaluation_is_completed(trial):
    assert trial.train(inject=at("evaluate.validate", 2, send, signal.SIGKILL))[0] == KILLED
    assert trial.saved() == [12, 10] and 12 not in records(trial.out_dir, "val_loss")
    out, _ = trial.goes_on()
    assert "step 12/12" not in out


def another(name: str, value):
    if isinstance(value, bool):
        return not value
    return {"model": "gpt2", "init_from": "x"}.get(name) or 2 * value


@pytest.mark.parametrize("name", [f.name for f in fields(TrainConfig) if f.metadata["fixed"]])
def test_a_flag_that_makes_another_run_is_refused_at_a_resume(trial, name, capfd, monkeypatch):
    trial.copy_whole()
    monkeypatch.chdir(trial.folder)
    flag = spell(name, another(name, saved_state(trial.out_dir)["flags"][name]))
    err = refused(["--resume", "--out-dir=run", *flag.split(), "--data-dir=data"], capfd)
    assert flag in err


# ---- Faults that end a run and cost no checkpoint ------------------------------------------------


def is_full(place=None):
    if isinstance(place, Path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    raise OSError(errno.ENOSPC, "No space left on device")


def save_on_full_disk(out_dir: Path, step: int, nth: int):
    """In a process of its own: the nth operation on files fails."""
    at_file_operation(nth, is_full)
    try:
        save(out_dir, step)
    except RunError:
        os._exit(RunError.exit_code)
    os._exit(0)


@pytest.mark.parametrize("is_damaged", [False, pytest.param(True, marks=slow)])
def test_a_full_disk_at_any_operation_of_a_save_leaves_the_old_or_the_new(tmp_path, is_damaged):
    """Also where a step is saved for the second time, since its first checkpoint is damaged."""
    (tmp_path / "before").mkdir()
    for step in (1, 2, 3):
        last = save(tmp_path / "before", step)
    new = 3 if is_damaged else 4
    if is_damaged:
        flip(last / "model.safetensors", 9999)
    codes = []
    for nth in range(1, 45):
        out_dir = shutil.copytree(tmp_path / "before", tmp_path / str(nth))
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=save_on_full_disk, args=(out_dir, new, nth))
        process.start()
        process.join()
        paths = checkpoints(out_dir)
        assert is_whole(newest(out_dir)) and sum(map(is_whole, paths)) >= 2 - is_damaged
        assert process.exitcode or is_whole(out_dir / f"step_{new:06d}")
        assert {path.name for path in out_dir.iterdir()} == {path.name for path in paths}
        codes.append(process.exitcode)
    assert codes[-1] == 0  # there is no such operation any more
    assert set(codes) == {0, RunError.exit_code} and codes.count(RunError.exit_code) > 12


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
        path.unlink()
        if how != "gone":
            path.write_bytes(data[:1100] if how == "cut" else data[:1024] + b"\xff" * 2018)


NO_MEMORY, IO_ERROR = torch.OutOfMemoryError("out of memory"), OSError(errno.EIO, "I/O error")


def in_save(name: str, nth: int) -> tuple:
    return at(f"checkpoint.{name}", nth, raise_error, IO_ERROR), 2, "I/O error"


FAULTS = {  # injection, ranks, words in its one line ("": a traceback), checkpoints that are left
    "nan": (at("train_step", 4, bad_loss, on_rank=1), 2, "step 3 is saved", [3]),
    "inf": (at("train_step", 4, bad_gradient, on_rank=1), 2, "step 3 is saved", [3]),
    "nan at first": (at("train_step", 1, bad_loss), 1, "step 0 is saved", [0]),
    "weights": (at("log_step", 6, change_a_weight, on_rank=1), 2, "the weights of rank 1", [5]),
    "full in the state": (at("checkpoint.save", 2, limit, 1000), 1, "step_000010", [5]),
    "full in the moments": (at("checkpoint.save", 2, limit, 100_000), 1, "step_000010", [5]),
    "full in the log": (at("log_step", 7, limit, 0), 1, "too large", [5]),
    "full in the log of two": (at("log_step", 7, limit, 0), 2, "too large", [5]),
    "moments": (*in_save("save_file", 3), [5]),
    "fsync": (*in_save("sync", 15), [5]),
    "rename": (*in_save("rename", 2), [5]),
    "fsync of the folder": (*in_save("sync", 20), [10, 5]),
    "rotation": (at("checkpoint.rotate", 2, raise_error, IO_ERROR), 1, "I/O error", [10, 5]),
    "cut shards": (at("log_step", 3, break_shards, "cut"), 1, "train_0000", []),
    "other shards": (at("log_step", 3, break_shards, "other"), 1, "65535", []),
    "no shards": (at("log_step", 3, break_shards, "gone"), 1, "train_0000", []),
    "no memory": (at("train_step", 7, raise_error, NO_MEMORY, on_rank=1), 2, "", [5]),
    "rank 0 dies": (at("log_step", 7, send, signal.SIGKILL), 2, "", [5]),
    "rank 1 dies": (at("log_step", 7, send, signal.SIGKILL, on_rank=1), 2, "", [5]),
}
FAST = ("nan", "nan at first", "weights", "full in the state", "full in the log", "rotation")
FAST += ("cut shards", "other shards", "rank 1 dies")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in FAST else slow) for name in FAULTS]
)
def test_a_fault_ends_the_run_with_1_and_costs_no_checkpoint(trial, fault):
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


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(trial, how):
    files = sorted(file.name for file in checkpoints(trial.whole[1])[0].iterdir())
    for name in files if how == "gone" else ("model.safetensors", "state.json"):
        shutil.rmtree(trial.out_dir, ignore_errors=True)
        path = checkpoints(trial.copy_whole())[0] / name
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            flip(path, 8 * path.stat().st_size // 2)
        out, err = trial.goes_on()
        assert "after step 10\n" in out and "step_000012" in err and name in err


def test_if_all_checkpoints_are_damaged_nothing_is_written(trial):
    for path in checkpoints(trial.copy_whole()):
        flip(path / "model.safetensors", 99_999)
    before = snapshot(trial.folder / "run")
    code, _, err = trial.train(steps=20)
    assert code == 1 and snapshot(trial.folder / "run") == before
    assert all(path.name in err for path in checkpoints(trial.out_dir)), err


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_a_checkpoint_that_can_not_be_read_now_ends_the_program_and_stays(trial, ranks, number):
    """Once, it was taken for damaged, and removed."""
    before = snapshot(trial.copy_whole(ranks))
    error = OSError(number, os.strerror(number))
    for name in ("checkpoint.hashlib.file_digest", "checkpoint.json.loads", "checkpoint.load_file"):
        code, _, err = trial.train(ranks, at(name, 1, raise_error, error), steps=20)
        assert code == 1 and len(err.splitlines()) == 1 and os.strerror(number) in err, err
        assert snapshot(trial.out_dir) == before
    if ranks == 1:
        trial.goes_on()


def test_leftovers_go_and_files_of_the_user_stay(trial):
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


def test_a_config_json_of_the_user_in_out_dir_is_not_written_over(trial):
    """As that of a GPT-2 in Hugging Face's format, which is trained further."""
    trial.out_dir.mkdir()
    (trial.out_dir / "config.json").write_text("mine")
    code, _, err = trial.train(auto_resume=None)
    assert (trial.out_dir / "config.json").read_text() == "mine"
    assert code == 2 and "--out-dir run" in err


def test_the_newest_and_the_best_are_kept_across_resumes(trial):
    """The last validation of a run that is extended was due because it was the last."""
    changes = {"save_every": 1, "eval_every": 3}
    assert trial.train(steps=5, **changes)[0] == 0
    assert trial.saved()[:2] == [5, 4]
    assert trial.train(steps=8, learning_rate=5, **changes)[0] == 0
    by_step = records(trial.out_dir, "val_loss")
    assert min(by_step, key=by_step.get) == 5 and trial.saved() == [8, 7, 5]
    assert trial.train(steps=12, eval_tokens=0, keep=3, **changes)[0] == 0
    assert trial.saved() == [12, 11, 10, 5]


@pytest.mark.parametrize("how", ["flipped", "emptied", "gone", "torn", "foreign"])
def test_flags_and_state_of_a_resume_are_never_read_from_the_log(trial, how):
    """A flipped bit once was another learning rate, and an emptied log the default flags."""
    trial.train(kill_after=7)
    log = trial.log.read_bytes()
    contents = {"emptied": b"", "torn": log + b'{"step": 12, "lo'}
    contents["flipped"] = log.replace(b'"learning_rate": 0.01', b'"learning_rate": 0.05', 1)
    contents["foreign"] = log + b'null\n{"loss": []}\n{"step": 9, "val_loss": "x"}\n\xff\n\0\n7\n'
    trial.log.write_bytes(contents.get(how, b""))
    if how == "gone":
        trial.log.unlink()
        (trial.out_dir / "config.json").unlink()
    code, _, err = train(["--out-dir", "run", "--resume", "--log-every=1"], trial.folder)
    assert code == 0 and digest(trial.out_dir) == digest(trial.whole[1]), err
    if how == "torn":
        assert b'"lo\n{"time"' in trial.log.read_bytes()


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
    if what == "a part of one":
        (max(Path("other/run").glob("step_*")) / "training.safetensors").unlink()
    if what == "no data":
        shutil.rmtree("other/data")
    os.chdir("other")


@pytest.mark.parametrize("what", ["no checkpoint", "a part of one", "other data", "no data"])
@pytest.mark.parametrize("how", ["resume", pytest.param("auto_resume", marks=slow)])
def test_ranks_whose_machines_hold_other_files_do_not_start(trial, what, how):
    trial.copy_whole(2)
    line = trial.command(**{"auto_resume": None, "steps": 20, how: True})
    codes, errors = trial.ends(line, 2, partial(other_machine, what))
    assert {*codes} <= {1, 2}
    [err] = errors[0].splitlines()
    assert "rank 1" in err and len(err) < 300, err
    assert trial.saved() == [12, 10]


def test_a_live_runs_folder_is_refused_and_free_when_it_is_killed(trial):
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


@slow
def test_the_soak_finds_nothing_lost(tmp_path, monkeypatch):
    """For an hour, and with longer runs: python tests/soak.py --minutes 60."""
    import soak

    monkeypatch.setattr(soak, "STEPS", 120)
    *_, counts = soak.soak(0.3, [2], 5, tmp_path)
    assert counts["starts"] > counts["runs"] >= 1 and not counts["runs that differ"]
