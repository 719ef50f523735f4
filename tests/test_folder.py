"""Tests ../support/folder.py."""

import gc
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import flags, state_of

import train_gpt2
from support.checkpoint import checkpoints, newest_checkpoint, save_checkpoint
from support.folder import Saver, TrainState
from support.optimizer import Optimizer


def test_a_name_that_only_looks_like_a_number_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("002", "3\u00b2", "4x", "9" * 30):
        Path("out", name).mkdir(parents=True)
    assert train_gpt2.folder.choose_out_dir("", resume=False) == Path("out", "003")


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")
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
    assert re.fullmatch(
        "train_gpt2.py: error: .*run.*(log.jsonl is|add --resume).*\n", capsys.readouterr().err
    )
    assert sorted(os.listdir()) == ["mine", "run"] and os.listdir("run") == ["log.jsonl"]
    assert Path("mine").read_text() == "mine\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")
def test_a_folder_that_another_run_wrote_to_meanwhile_is_not_taken(tmp_path):
    """Between the look at its checkpoints and its lock, as when a scheduler starts a run again
    while the old one still ends."""
    save_checkpoint(tmp_path, state_of(5), 2)
    with pytest.raises(OSError, match="has a new checkpoint meanwhile: repeat"):
        train_gpt2.folder.take(tmp_path, 2, 0, seen=[])
    train_gpt2.folder.take(tmp_path, 2, 0, seen=checkpoints(tmp_path)).close()


def test_a_save_that_finds_no_memory_for_a_copy_is_written_at_once(tmp_path, monkeypatch):
    """The computer's memory may have gone to others since the save before."""

    def no_copy(saved, copies):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 18 GB"
        )

    monkeypatch.setattr(train_gpt2.folder, "copied", no_copy)
    with Saver(tmp_path, 2, torch.device("cuda"), lambda *_, **__: None, print) as saver:
        saver.save(state_of(5), wait=False)
        assert checkpoints(tmp_path)  # before it trains on


def test_a_save_of_the_step_that_is_being_saved_waits_for_it(tmp_path):
    """As of a run that is stopped while it validates; it writes again only what has failed."""
    told = []
    saver = Saver(
        tmp_path, 2, torch.device("cuda"), lambda *_, saved, **__: told.append(saved), print
    )
    with saver:
        saver.save(state_of(5), wait=False)
        saver.save(state_of(5), wait=True)
        assert told == [5]
        write, saver.write = saver.write, failing
        saver.save(state_of(6), wait=False)
        saver.write = write
        with pytest.raises(OSError, match="full"):
            saver.save(state_of(6), wait=True)
        assert told == [5, 6]


def failing(saved):
    raise OSError("full")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.usefixtures("shapes_at_hand")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_the_checkpoint_that_they_read_until_they_train(tmp_path, ranks):
    """Eight of them would need eight times its memory; a file that is cut ends who maps it."""
    path = save_checkpoint(tmp_path, state_of(7, muon=True), 2)
    _, saved = newest_checkpoint(tmp_path, print, lambda value: [value] * ranks)
    assert (str(path) in Path("/proc/self/maps").read_text()) == (ranks == 2)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(4, 2, 1, 1, 4, False))
    decayed, others = model.decay_groups()
    optimizer = Optimizer([{"params": decayed}, {"params": others}], model.matrices())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    TrainState(model, optimizer, SimpleNamespace(position=0), scaler).load_state_dict(saved)
    del saved
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert all((value == 7).all() for own in optimizer.state.values() for value in own.values())
