"""Tests ../support/ranks.py: who the ranks are, and how they end together."""

import json
import math
import os
import re
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import finish, flags, free_port, start_ranks
from test_cli import HOSTILE, refused
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import train_gpt2
from support import ending, ranks
from support.ending import NoGoodCheckpoint, NumericalError, UserError
from support.ranks import World, find_world

ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
EIGHT = ONE | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_a_rank_has_the_gpu_with_its_local_number():
    two_nodes = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert find_world(two_nodes, 8) == World(11, 16, torch.device("cuda", 3))
    assert find_world(two_nodes, 0) == World(11, 16, torch.device("cpu"))
    assert find_world(two_nodes, 8, "cpu") == World(11, 16, torch.device("cpu"))
    assert find_world({}, 1) == World(0, 1, torch.device("cuda", 0))
    assert [find_world({}, 0).is_main, find_world(two_nodes, 8).is_main] == [True, False]


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"},  # as Kubeflow sets them
        dict.fromkeys(ONE, ""),
        {"RANK": "0"},
        {"SLURM_NTASKS": "1", "PMI_SIZE": ""},
        ONE | {"SLURM_NTASKS": "2"},  # torchrun on each of two nodes, of which one is left
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # the script of a job
    ],
)
def test_one_process_is_alone_whatever_its_launcher_sets(env):
    assert find_world(env, 0) == World(0, 1, torch.device("cpu"))


REFUSED = [  # what torchrun sets, GPUs, --device
    ({"WORLD_SIZE": "2"}, 0, "auto", "RANK, LOCAL_RANK not set, but torchrun sets all three"),
    ({"RANK": "1"}, 0, "auto", "RANK 1 .* WORLD_SIZE 1"),
    ({"SLURM_NTASKS": "4"}, 0, "auto", "SLURM_NTASKS is 4, .*torchrun.*or unset SLURM_NTASKS"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "RANK": ""}, 0, "auto", "OMPI_COMM_WORLD_SIZE is 2"),
    ({"PMI_SIZE": "8"}, 0, "auto", "PMI_SIZE is 8"),
    ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, 0, "auto", "NTASKS is 2"),
    (ONE | {"RANK": "2", "WORLD_SIZE": "2"}, 0, "auto", "RANK 2 .* WORLD_SIZE 2"),
    (ONE | {"WORLD_SIZE": "0"}, 0, "auto", "RANK 0 .* WORLD_SIZE 0"),
    (ONE | {"LOCAL_RANK": "1e30"}, 0, "auto", "must be integers .*1e30.*: use torchrun"),
    (EIGHT, 4, "auto", "nproc_per_node=8 exceeds the 4 GPUs .*0,1,2,3.* try .*=4"),
    (ONE | {"LOCAL_RANK": "1"}, 1, "cuda", "nproc_per_node=2 exceeds the 1 GPUs"),
    ({}, 0, "cuda", "--device cuda: PyTorch sees no GPU"),
    ({}, 0, "mps", "--device mps: there is no Apple GPU"),
]


@pytest.mark.parametrize(("env", "num_gpus", "kind", "message"), REFUSED)
def test_ranks_that_do_not_fit_are_refused(env, num_gpus, kind, message):
    with pytest.raises(UserError, match=message):
        find_world(env, num_gpus, kind)


@pytest.mark.parametrize("name", [*ONE, "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_no_rank_is_a_traceback(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    env = ONE | {"LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1", "MASTER_ADDR": "127.0.0.1"}
    if name == "MASTER_PORT":  # which one rank alone does not need
        env["WORLD_SIZE"] = "2"
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    for text in HOSTILE:
        is_number = re.fullmatch(r"-?[\d_]+", text)  # a rank that takes it waits for others
        if "\0" not in text and not (is_number and name in ("WORLD_SIZE", "MASTER_PORT")):
            monkeypatch.setenv(name, text)
            refused(["--data-dir", "nowhere"], capsys)


def test_the_group_of_ranks_waits_longer_than_the_watchdog(monkeypatch):
    """So it is the watchdog that ends a hang, and shows where. NCCL's own limit is ten minutes."""
    timeouts = []

    def connect(backend, timeout, **place):
        timeouts.append(timeout.total_seconds())

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in ({"RANK": "0", "WORLD_SIZE": "1"} | where).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks.dist, "init_process_group", connect)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: None)
    with ranks.process_group(World(0, 2, torch.device("cpu"))):
        assert timeouts[0] > ending.TIMEOUT_S


def test_several_gpus_without_nccl_are_refused(monkeypatch):
    """As on Windows. torch's own error would be a traceback."""
    monkeypatch.setattr(ranks.dist, "is_nccl_available", lambda: False)
    group = ranks.process_group(World(0, 2, torch.device("cuda", 0)))
    with pytest.raises(ending.UserError, match="use one GPU, or Linux"), group:
        pass


def fail():
    raise NoGoodCheckpoint("none is good")


def fail_on_main(world: World):
    values = torch.tensor([1.0, math.inf if world.rank else 1.0])
    assert world.sum(values).tolist() == [2, math.inf]
    assert world.gather(world.rank) == [0, 1]
    assert world.call_on_main(str, world.rank) == "0"
    world.check_same({"--seed": 1})
    world.call_on_main(fail)


def differ(world: World):
    world.check_same({"--steps": 7, "--seed": world.rank})


def have_no_number(world: World):
    world.end_all(NumericalError(f"seen by rank {world.rank}"))


def end_with_network(world: World):
    net = DDP(nn.Linear(1, 1))
    destroy, reference = dist.destroy_process_group, weakref.ref(net)

    def destroy_after_network():
        assert reference() is None, "the group of ranks ends before the network"
        destroy()

    dist.destroy_process_group = destroy_after_network
    have_no_number(world)


def fail_after_it(world: World):
    try:
        end_with_network(world)
    finally:
        world.call_on_main(fail)


ENDS = [
    (end_with_network, 4, "seen by rank 0"),
    (fail_after_it, 7, "none is good"),
    (fail_on_main, 7, "none is good"),
    (differ, 2, "--seed is 1 on rank 1 and 0 on rank 0: all ranks must agree"),
    (have_no_number, 4, "seen by rank 0"),
]


@pytest.mark.parametrize(("act", "code", "message"), ENDS)
def test_ranks_end_together_with_one_line(act, code, message, tmp_path):
    processes = start_ranks([], tmp_path, 2, inject=partial(instead_of_a_run, act))
    assert finish(processes, tmp_path) == (code, "", f"train_gpt2.py: error: {message}\n")
    assert processes[1].exitcode == code and (tmp_path / "rank1.err").read_text() == ""
    for rank in range(2):  # torchrun shows the one of the rank that it saw fail first
        left = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert message.partition(" by rank")[0] in left["message"]["message"]


def instead_of_a_run(act, rank: int):
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"rank{rank}.json"
    train_gpt2.set_up_and_train = lambda typed, world: act(world)


NOTE_THREADS = """
import os, sys
from pathlib import Path

import train_gpt2

code = train_gpt2.main(sys.argv[1:])
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
Path("threads" + os.environ["RANK"]).write_text("".join(names))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_gloo_outlives_the_group_of_ranks(data_dir, tmp_path):
    """A thread that frees a tensor while Python ends aborts the process, once in some thousand.
    In processes of their own: those of the other tests have imported all of torch before."""
    (tmp_path / "note_threads.py").write_text(NOTE_THREADS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = flags(data_dir=data_dir, out_dir="run", steps=1, warmup_steps=0)
    env = os.environ | {"PYTHONPATH": os.path.dirname(train_gpt2.__file__)}
    subprocess.run([*torchrun, "note_threads.py", *line], check=True, cwd=tmp_path, env=env)
    for rank in range(2):
        names = (tmp_path / f"threads{rank}").read_text()
        assert "python" in names and "gloo" not in names
