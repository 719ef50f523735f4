"""Tests ../support/ranks.py: who the ranks are."""

from datetime import timedelta

import pytest
import torch
from test_flags import HOSTILE, refused

from support import ranks
from support.ranks import World, find_world


def test_a_rank_with_an_older_program_is_told(monkeypatch):
    """It lacks what the main rank knows of."""
    world = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, facts: [facts, {}])
    with pytest.raises(ValueError, match="--muon is None on rank 1 and True on rank 0: start all"):
        world.agree({"--muon": True})


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
