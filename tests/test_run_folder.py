"""Tests which folder a run writes into, and which ones it leaves alone."""

import errno
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import NEEDS_POSIX, content, flags, losses, prepare, train
from filelock import FileLock

import train_gpt2
from support.ending import RunError, UserError
from support.files import FolderLock
from support.run_folder import (
    PROCESS,
    as_size,
    begin,
    check_disk_space,
    choose_out_dir,
    is_slip,
    leave,
    newest_run,
    take_folder,
)


def test_a_name_that_only_looks_like_a_number_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("002", "3\u00b2", "4x", "9" * 30):
        Path("out", name).mkdir(parents=True)
    assert choose_out_dir("", resume=False) == Path("out", "003")
    assert choose_out_dir("", resume=True) == Path("out", "002")


def test_runs_are_numbered_and_resume_takes_the_newest(data_dir, tmp_path):
    line = flags(data_dir=data_dir, steps=3)
    for _ in range(2):
        assert train(line, tmp_path)[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["001", "002"]
    code, out, _ = train([*flags(data_dir=data_dir, steps=4), "--resume"], tmp_path)
    assert code == 0 and "resumed after step 3" in out
    assert max(losses(tmp_path / "out" / "002")) == 4


def test_the_newest_run_is_the_one_that_saved_last(tmp_path):
    for i, name in enumerate(("book/step_000009", "002/step_000050", "002/step_000100")):
        (tmp_path / name).mkdir(parents=True)
        os.utime(tmp_path / name, (i, 9 - i))
    (tmp_path / "999").mkdir()  # has saved nothing
    (tmp_path / "notes.txt").touch()
    assert newest_run(tmp_path) == tmp_path / "book"
    os.utime(tmp_path / "002/step_000100", (99, 99))
    assert newest_run(tmp_path) == tmp_path / "002"
    assert newest_run(tmp_path / "nowhere") is None


def test_a_resume_before_the_first_checkpoint_needs_the_whole_command(data_dir, tmp_path):
    """A new run would lack the flags of the one that was killed."""
    line = flags(data_dir=data_dir, out_dir="out/run", steps=3)
    assert train(line, tmp_path)[0] == 0
    folder = tmp_path / "out/run"
    content = (folder / "log.jsonl").read_bytes()

    def resume(*words: str) -> tuple[int, str, str]:
        """Resume a run of which only the log is there."""
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "log.jsonl").write_bytes(content)
        return train([*words, "--resume"], tmp_path)

    for short in (["--out-dir=out/run"], [], ["--learning-rate=1"]):
        code, out, err = resume(*short)
        assert code == 2 and "its run ended before it saved one, or its checkpoints are" in err
        assert "gone: repeat python" in err and not out
    _, *words = shlex.split(err.partition("repeat python ")[2])
    for whole in (words, [*line, "--seed=3"]):  # which names its data itself
        code, out, err = resume(*whole)
        assert code == 0 and "so a new run begins" in out, err
    resume("--out-dir=out/run")
    lock = FolderLock(folder)
    lock.acquire()  # as if the run went on
    code, out, err = train(["--out-dir=out/run", "--resume"], tmp_path)
    lock.release()
    assert code == 2 and "belongs to a live run" in err and "repeat" not in err and not out
    # The record of the first start is damaged or in another file.
    content = b'{"typed": ["steps"], "flags": {"steps": 3}, "resumed": 5}\n'
    code, out, err = resume("--out-dir=out/run")
    assert code == 2 and "are gone: repeat its whole command" in err and not out


def test_a_process_leaves_no_note_but_that_of_another_stays(tmp_path):
    note = tmp_path / PROCESS
    begin(tmp_path, FolderLock(tmp_path), is_new=False)
    assert note.read_text().startswith(f"process {os.getpid()} on ")
    leave(tmp_path)
    assert not note.exists()
    leave(tmp_path)  # nothing to do
    note.write_text("process 3 on another machine")
    leave(tmp_path)
    assert note.exists()


def test_a_resume_that_would_be_another_run_is_answered_with_that_runs_command(data_dir, tmp_path):
    """It has the flags with which the old run began, which the user need not type again."""
    line = flags(data_dir=data_dir, out_dir="run", steps=3, learning_rate=0.002)
    assert train(line, tmp_path)[0] == 0
    tuned = ["--init-from=run", "--out-dir=tuned", f"--data-dir={data_dir}", "--steps=3"]
    assert train([*tuned, "--batch-tokens=96"], tmp_path)[0] == 0
    longer = ["--out-dir=run", "--resume", "--steps=4", "--learning-rate=0.003", "--grad-clip=2"]
    assert train(longer, tmp_path)[0] == 0
    for name, change, kept in (
        ("run", "--n-layer 3", "--steps 4"),
        ("run", "--seed 8", "--grad-clip 2"),  # typed at the resume alone
        ("run", "--seed 7", "--learning-rate 0.003"),  # changed by a resume
        ("tuned", "--seed 7", "--init-from run"),
    ):
        code, _, err = train([f"--out-dir={name}", "--resume", *change.split()], tmp_path)
        assert code == 2 and change in err and kept in err and "--resume" not in err, err
        _, *words = shlex.split(err.partition("begin a new run: python ")[2])
        code, out, err = train([*words[:-1], f"new-{name}{change[-1]}"], tmp_path)
        assert code == 0 and f"done: {3 if name == 'tuned' else 4} steps" in out, err
    code, _, err = train(["--out-dir=run", "--eval-only", "--seq-len=64"], tmp_path)
    assert code == 2 and "--learning-rate 0.003" in err and "--seq-len 64" in err
    assert "--eval-only" not in err and "compile" not in err
    whole = (tmp_path / "run/log.jsonl").read_text()
    other = '{"flags": {"dropout": 0.1}, "typed": ["dropout"], "resumed": null}\n'  # saved nothing
    for log, kept in (
        ("", ""),
        ('{"typed": 3}\n', ""),
        ('{"typed": ["rope"], "flags": ["rope"]}\n', ""),
        (other + whole, "--learning-rate 0.003"),
        (whole + '{"typed": ["weight_decay"], "fl', "--learning-rate 0.003"),  # cut
        (whole.replace('"typed": [', '"typed": ["rope", '), "--learning-rate 0.003"),
    ):
        (tmp_path / "run/log.jsonl").write_text(log)
        code, _, err = train(["--out-dir=run", "--resume", "--seed=7"], tmp_path)
        assert code == 2 and "begin a new run: python" in err and kept in err, err
        assert f"--data-dir {data_dir}" in err and "--seed 7" in err and "--dropout" not in err


def test_a_resume_without_a_run_says_so_and_which_name_is_near(data_dir, tmp_path):
    line = [*flags(data_dir=data_dir, steps=3), "--resume"]
    code, out, err = train([*line, "--out-dir", "out/novel"], tmp_path)
    assert code == 0, err
    new = f"{Path('out', 'novel')} holds no checkpoint to resume from, so a new run begins"
    assert out.splitlines()[0] == new
    hint = f"did you mean {re.escape(str(Path('out', 'novel')))}"
    for name, words in (("out/novla", hint), ("out", "but runs: name one"), ("novel", hint)):
        code, out, err = train([*line, "--out-dir", name], tmp_path)
        assert code == 2 and re.search(f"to resume from.*{words}", err) and not out, err
    assert os.listdir(tmp_path / "out") == ["novel"]
    # Otherwise it would train on Python's source.
    (tmp_path / "empty").mkdir()
    for name in ("elsewhere", "empty"):
        code, out, err = train(["--resume", f"--out-dir={name}", "--steps=4"], tmp_path)
        assert code == 2 and "to resume from: name the run's folder" in err and not out, err
        assert "leave --resume out" in err and not any(tmp_path.glob(f"{name}/*"))
    assert train([*line, "--out-dir", "empty"], tmp_path)[0] == 0
    # The nearest name comes first, and a bare --resume may name one of a series.
    shutil.copytree(tmp_path / "out/novel", tmp_path / "out/novel2")
    for name, near in (("novell2", "novel2"), ("novel22", "novel2"), ("novl", "novel")):
        code, out, err = train(["--resume", f"--out-dir=out/{name}"], tmp_path)
        assert code == 2 and f"did you mean {Path('out', near)}?" in err, err
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "out/novel/step_000003" / name, model)
    code, _, err = train([*line, "--out-dir", "model"], tmp_path)
    assert code == 2 and "begin a new run with --init-from model" in err
    code, out, err = train([*flags(data_dir=data_dir, steps=4), "--resume"], tmp_path)
    assert code == 0 and "resumed after step 3" in out, err  # the only run there is


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_used_and_they_stay(data_dir, tmp_path, resume):
    """As the output of nohup or SLURM, a disk's own folder, or a file that keeps it in git."""
    names = ["train.log", "slurm-1.out", ".DS_Store", ".gitkeep", "config.json", "step_best"]
    out_dir = tmp_path / "run"
    (out_dir / "lost+found").mkdir(parents=True)
    for name in names:
        (out_dir / name).write_text("mine")
    assert train(flags(data_dir=data_dir, out_dir="run", steps=3, resume=resume), tmp_path)[0] == 0
    assert (out_dir / "step_000003").is_dir() and (out_dir / "lost+found").is_dir()
    assert all((out_dir / name).read_text() == "mine" for name in names)


def test_what_a_first_save_leaves_when_it_is_killed_is_no_run_and_no_obstacle(tmp_path):
    for name in (".lock", "log.jsonl", "curves.png", "curves-2.png"):  # plot.py's
        (tmp_path / name).touch()
    for name in ("step_000250.tmp", "wandb"):
        (tmp_path / name).mkdir()
    assert choose_out_dir(str(tmp_path), False) == choose_out_dir(str(tmp_path), True) == tmp_path


def test_sums_that_a_user_made_in_a_run_do_not_make_it_a_checkpoint(whole, tmp_path):
    shutil.copytree(whole[1], tmp_path / "run")
    (tmp_path / "run" / "SHA256SUMS").touch()
    assert choose_out_dir(str(tmp_path / "run"), True) == tmp_path / "run"


@NEEDS_POSIX
@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a pipe", "a folder"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_log_that_is_elsewhere_is_refused(kind, resume, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("mine").write_text("mine\n")
    log = Path("run/log.jsonl")
    if "link" in kind:
        log.symlink_to("../nothing" if "nothing" in kind else "../mine")
    else:
        os.mkfifo(log) if kind == "a pipe" else log.mkdir()
    assert train_gpt2.main(flags(data_dir=data_dir, out_dir="run", resume=resume)) == 2
    assert re.fullmatch("train_gpt2.py: error: run.log.jsonl is .*\n", capsys.readouterr().err)
    assert sorted(os.listdir()) == ["mine", "run"] and os.listdir("run") == ["log.jsonl"]
    assert Path("mine").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["run", "a/b/run"])
def test_a_drive_that_is_not_there_is_one_line(name, monkeypatch):
    """As Q:\\run on Windows."""
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(UserError, match=f"--out-dir {name}: there is no drive"):
        check_disk_space(Path(name), 1, 1)


NO_LOCKS = [NotImplementedError("no flock"), OSError(errno.ENOLCK, "no locks")]
NO_LOCKS += [OSError(errno.EOPNOTSUPP, "not supported")]


@pytest.mark.parametrize("error", NO_LOCKS, ids=str)
def test_a_disk_without_locks_is_said_and_used(error, tmp_path, texts, monkeypatch, capsys):
    def refuse(*_, **__):
        raise error

    assert prepare(tmp_path / "locked", "--input", texts) == 0
    (tmp_path / "locked" / ".lock").unlink()
    monkeypatch.setattr(FileLock, "acquire", refuse)
    monkeypatch.chdir(tmp_path)
    assert prepare(tmp_path / "data", "--input", texts) == 0
    assert content(tmp_path / "data") == content(tmp_path / "locked")
    assert "data can't be locked" in capsys.readouterr().err
    line = flags(data_dir="data", out_dir="run", steps=3, warmup_steps=1)
    assert train_gpt2.main(line) == 0 and (tmp_path / "run" / "step_000003").is_dir()
    assert re.fullmatch("train_gpt2.py: run can't be locked .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(errno.EACCES, 2), (errno.ENOSPC, 6), (errno.EIO, 6)]
)
def test_a_folder_that_can_not_be_written_is_refused(number, exit_code, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(RunError, match="can't write to --out-dir") as caught:
        take_folder(tmp_path / "run", FolderLock(tmp_path / "run"), True)
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("novla", "novela", True),
        ("novella", "novela", True),
        ("run-1", "run-2", False),
        ("baseline-a", "baseline-b", False),
        ("muon=True,seed=1", "muon=False,seed=1", False),
        ("muon=False,schedule=wsd", "muon=False,schedule=cosine", False),
        ("124M", "124M-b", False),
        ("shakespeare-bpe", "shakespeare-char", False),
        ("shakespaere-bpe", "shakespeare-bpe", True),
    ],
)
def test_a_slip_of_the_hand_is_no_name_of_a_series(name, other, expected):
    assert is_slip(name, other) == is_slip(other, name) == expected


def test_what_was_begun_last_is_resumed_even_if_it_saved_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out/002/step_000050").mkdir(parents=True)
    Path("out/book").mkdir()
    for at, name in enumerate(("002", "book"), 1):
        Path("out", name, "log.jsonl").touch()
        os.utime(Path("out", name, "log.jsonl"), (at, at))
    assert choose_out_dir("", resume=True) == Path("out", "book")
    assert choose_out_dir("", resume=False) == Path("out", "003")


def test_small_sizes_are_said_in_megabytes():
    assert [as_size(n) for n in (44_040_192, 1e8, 6.02e9)] == ["44.0 MB", "0.1 GB", "6.0 GB"]
