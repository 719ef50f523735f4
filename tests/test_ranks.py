"""Tests ../support/ranks.py: who the ranks are, and what --zero shares out."""

import gc
import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import digest, flags, losses, run, train
from test_flags import HOSTILE, refused
from test_train_gpt2 import large_scale

import train_gpt2
from support import ranks
from support.checkpoint import read_checkpoint
from support.ranks import World, find_world


def test_a_rank_with_an_older_program_is_told(monkeypatch):
    """It lacks what the main rank knows of."""
    world = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, facts: [facts, {}])
    with pytest.raises(ValueError, match="--json is None on rank 1 and True on rank 0: start all"):
        world.agree({"--json": True})


def test_zero_saves_before_and_after_its_first_update(data_dir, tmp_path):
    """The first steps overflow, and without --fused nothing has moments before the first update. In
    the background its copies are those of the save before."""
    changes = {"fp16": True, "fused": False, "zero": True, "save_every": 1, "steps": 24}
    line = flags(data_dir=data_dir, out_dir="run", **changes)
    code, _, err = train(line, tmp_path, 2, kill_after=2, inject=large_scale)
    assert code not in range(8), err
    assert read_checkpoint(tmp_path / "run" / "checkpoint_000001.pt")["optimizer"] == {}
    code, _, err = train([*line, "--resume"], tmp_path, 2, inject=count_copies)
    assert code == 0, err
    counts = json.loads((tmp_path / "copies").read_text())
    assert counts[-1] == counts[-4] > 50  # weights and moments


def count_copies(rank: int):
    large_scale(rank)
    write, counts = train_gpt2.folder.Saver.write, []
    train_gpt2.folder.Saver.in_background = property(lambda self: True)

    def write_and_count(saver, saved):
        counts.append(len(saver.copies))
        Path("copies").write_text(json.dumps(counts))
        write(saver, saved)

    train_gpt2.folder.Saver.write = write_and_count


@pytest.mark.parametrize(
    "changes", [{}, *(pytest.param(c, marks=pytest.mark.slow)
                      for c in ({"fused": False}, {"fp16": True}, {"muon": False}))]
)  # fmt: skip
def test_zero_changes_no_bit_and_shares_out_the_moments(data_dir, tmp_path, changes):
    """Its checkpoint is that of other runs, which go on from it and it from theirs."""
    whole = run(tmp_path, data_dir, "whole", 3, **changes)
    line = flags(data_dir=data_dir, out_dir="run", zero=True, **changes)
    code, _, err = train(line, tmp_path, 3, inject=count_moments)
    assert code == 0, err
    assert losses(tmp_path / "run") == losses(whole) and digest(tmp_path / "run") == digest(whole)
    counts = [json.loads((tmp_path / f"moments{rank}").read_text()) for rank in range(3)]
    saved, other = (read_checkpoint(d / "checkpoint_000012.pt") for d in (tmp_path / "run", whole))
    assert torch.equal(flat(saved["optimizer"]), flat(other["optimizer"]))
    sizes = [sum(t.numel() for t in s.values() if t.dim()) for s in saved["optimizer"].values()]
    assert sum(counts) == sum(sizes)
    assert max(counts) < max(0.4 * sum(sizes), max(sizes) + 1)  # one tensor is not cut


def flat(state: dict) -> torch.Tensor:
    return torch.cat([state[i][name].flatten() for i in sorted(state) for name in sorted(state[i])])


def count_moments(rank: int):
    check = train_gpt2.ranks.check_replicas

    def count_and_check(model, *args):
        check(model, *args)
        [optimizer] = [o for o in gc.get_objects() if type(o) is train_gpt2.SharedOptimizer]
        moments = [t.numel() for s in optimizer.state.values() for t in s.values() if t.dim()]
        Path(f"moments{rank}").write_text(json.dumps(sum(moments)))

    train_gpt2.ranks.check_replicas = count_and_check


def test_a_run_goes_on_with_zero_and_without(whole, data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", save_every=3)
    assert train([*line, "--zero"], tmp_path, 3, kill_after=4)[0] not in range(8)
    code, out, err = train([*line, "--no-zero", "--resume"], tmp_path, 2, kill_after=7)
    assert code not in range(8) and "--zero False instead of True" in out
    code, out, err = train([*line, "--zero", "--resume"], tmp_path, 3)
    assert code == 0 and "resumed after step 6" in out, err
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1]), rel=1e-6)


@pytest.mark.parametrize(
    ("env", "num_gpus", "message"),
    [
        ({"RANK": "0"}, 0, "LOCAL_RANK, WORLD_SIZE not set, others of torchrun's are"),
        ({"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "2"}, 0, "RANK 2 .* WORLD_SIZE 2"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8",
             "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            4,
            "nproc_per_node=8 is more than the 4 GPUs .*CUDA_VISIBLE_DEVICES=0,1,2,3.* try .*=4",
        ),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused(env, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        find_world(env, num_gpus)


RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@pytest.mark.parametrize("name", RANKS)
def test_no_rank_is_a_traceback(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plain = dict(zip(RANKS, ("0", "0", "1", "1", "1"), strict=True))
    for key, value in plain.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2" if name == "MASTER_PORT" else "1")
    for text in HOSTILE:
        if "\0" not in text and (name != "MASTER_PORT" or text not in ("0", "-0", "1_0", "٣")):
            monkeypatch.setenv(name, text)
            err = refused(["--data-dir", "nowhere"], capsys)
            assert name in err or "nowhere" in err
    for num_gpus in (0, 1):
        with pytest.raises(ValueError, match="LOCAL_RANK|WORLD_SIZE is"):
            find_world({**plain, "LOCAL_RANK": "1" if num_gpus else "1e30"}, num_gpus)


@pytest.mark.parametrize(("timeout_s", "seconds"), [(900, 960), (0, 365 * 86400)])
def test_the_watchdog_speaks_before_the_group_of_ranks_does(monkeypatch, timeout_s, seconds):
    """NCCL's own limit is ten minutes, the watchdog's fifteen."""
    found = []
    monkeypatch.setattr(ranks, "meet", lambda backend, timeout: found.append(timeout))
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: None)
    with ranks.process_group(World(0, 2, torch.device("cpu")), timeout_s):
        assert found == [timedelta(seconds=seconds)]


def count_messages(rank: int):
    broadcast, counts = ranks.dist.broadcast, []

    def count(tensor, *args, **kwargs):
        counts.append(tensor.numel())
        Path(f"messages{rank}").write_text(json.dumps(counts))
        return broadcast(tensor, *args, **kwargs)

    ranks.dist.broadcast = count


def test_zero_sends_each_ranks_part_in_one_piece(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", zero=True, save_every=0, steps=4)
    code, _, err = train(line, tmp_path, 2, inject=count_messages)
    assert code == 0, err
    saved = read_checkpoint(tmp_path / "run" / "checkpoint_000004.pt")
    size = sum(t.numel() for name, t in saved["model"].items() if name != "lm_head.weight")
    counts = json.loads((tmp_path / "messages0").read_text())
    assert [counts[i] + counts[i + 1] for i in (0, 2, 4, 6)] == [size] * 4
