"""What a run promises: its numbers, its speed-ups, and its one line about a mistake."""

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    digest,
    equal,
    finish,
    flags,
    large_scale,
    losses,
    moments,
    questions,
    records,
    refused,
    run,
    saved_state,
    start_ranks,
    train,
    weights,
    write_shard,
)
from torch import distributed as dist
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as network
import train_gpt2
from config import TrainConfig
from dataloader import ShardLoader, open_folder
from model import GPT, GPTConfig
from support import checkpoint, world
from support.checkpoint import checkpoints
from train_gpt2 import learning_rate, make_optimizer

slow = pytest.mark.slow
OF_WEIGHTS = dict.fromkeys(("model", "n_layer", "n_head", "n_embd"))  # flags that weights decide


# ---- The mathematics -----------------------------------------------------------------------------


def plain_loop(data_dir: Path, seed: int | None) -> Iterator[tuple[float, float]]:
    """Yield the loss and the gradient's norm of each step of TINY with AdamW, in a few lines."""
    data = open_folder(data_dir)
    model = GPT(GPTConfig(257, seq_len=16, n_layer=2, n_head=2, n_embd=32), seed=1337)
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (1, 0)]
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip(kinds, (1, 0), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    loader = ShardLoader(data.train, 12, 16, seed=seed)
    for step in range(12):
        x, y = map(torch.from_numpy, loader.next_batch())
        optimizer.zero_grad()
        loss = F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1, 0.5 / norm)
        for group in optimizer.param_groups:  # nano's schedule is wsd
            group["lr"] = 0.01 * min((step + 1) / 2, 1, (12 - step) / 10)
        optimizer.step()
        yield loss.item(), norm


def test_beta2_beside_muon():
    config = TrainConfig(bf16=False, warmup_steps=0)
    alone = world.World(0, 1, torch.device("cpu"))
    optimizer = make_optimizer(GPT(GPTConfig(257, 16, 2, 2, 32)), config, alone)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.99)] * 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_plain_loop(data_dir, tmp_path, shuffle):
    expected = plain_loop(data_dir, 1337 if shuffle else None)
    changes = {"muon": False, "weight_decay": 1, "grad_clip": 0.5, "shuffle": shuffle}
    out_dir = run(tmp_path, data_dir, **changes)
    found = zip(losses(out_dir).values(), records(out_dir, "grad_norm").values(), strict=True)
    for (loss, norm), (their_loss, their_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(their_loss, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-4)


def test_cosine():
    config = TrainConfig(steps=19_073)
    rates = [learning_rate(step, config) for step in (0, 714, 715, 9894, 19_073)]
    assert rates == pytest.approx([6e-4 / 715, 6e-4, 6e-4, 3.3e-4, 6e-5])
    assert learning_rate(9894, replace(config, schedule="constant")) == 6e-4
    to_zero = replace(config, decay_to=0.0)
    rates = [learning_rate(step, to_zero) for step in (714, 9894, 19_073)]
    assert rates == pytest.approx([6e-4, 3e-4, 0])


def test_wsd():
    config = TrainConfig(steps=1000, warmup_steps=100, schedule="wsd", learning_rate=1.0)
    rates = [learning_rate(step, config) for step in (49, 99, 100, 799, 800, 900, 999)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 0.55, 0.1045])
    half = replace(config, decay_share=0.5, decay_to=0)
    assert [learning_rate(step, half) for step in (499, 750)] == pytest.approx([1, 0.5])
    for share, last in ((1, 1 / 900), (0, 1)):  # from the warm-up on; never
        whole = replace(config, decay_share=share, decay_to=0)
        assert learning_rate(999, whole) == pytest.approx(last)


@pytest.mark.parametrize(("ranks", "B"), [(1, 8), (2, 2), pytest.param(3, 1, marks=slow)])
def test_micro_batches_and_ranks(data_dir, once, tmp_path, ranks, B):
    batch = {"batch_tokens": 768}  # 48 sequences
    make = partial(run, data_dir=data_dir, micro_batch_size=4, **batch)
    one = losses(once("48-sequences", make) / "run")
    several = run(tmp_path, data_dir, ranks=ranks, micro_batch_size=B, **batch)
    assert losses(several) == pytest.approx(one, rel=1e-6)


class Collectives(TorchDispatchMode):
    """Adds up the bytes of each kind of collective's results. An all-reduce of three numbers is a
    kind of its own."""

    def __init__(self):
        super().__init__()
        self.sent: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            num_bytes = sum(tensor.nbytes for tensor in tree_leaves(args[0]))
            self.sent["numbers" if num_bytes == 12 else str(function)] += num_bytes
        return function(*args, **(kwargs or {}))


def average(_, bucket) -> Future[torch.Tensor]:
    """DDP's own hook would fail: an all-reduce of the fake group has no result."""
    dist.all_reduce(bucket.buffer())
    future = Future()
    future.set_result(bucket.buffer())
    return future


def count_collectives(size: int, rank: int):
    """Injection: this process is one of `size` ranks, whose collectives do nothing. Write down what
    each step sends."""
    os.environ.update(RANK="0", WORLD_SIZE=str(size))
    world.connect = lambda _: dist.init_process_group("fake", None, None, size, 0, FakeStore())
    train_step, steps = train_gpt2.train_step, []

    class AveragingDDP(train_gpt2.DDP):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_comm_hook(None, average)

    def counted(*args):
        with Collectives() as collectives:
            result = train_step(*args)
        steps.append(collectives.sent)
        Path("sent").write_text(json.dumps(steps))
        return result

    train_gpt2.DDP, train_gpt2.train_step = AveragingDDP, counted


@pytest.mark.parametrize("size", [2, 8])
def test_what_a_step_sends(size, data_dir, tmp_path):
    """The gradients once, not once per pass; Muon's updates once, in bfloat16; three numbers."""
    changes = {"n_layer": 8, "muon": True, "bf16": True, "batch_tokens": 3 * size * 16}
    line = flags(data_dir=data_dir, out_dir="run", steps=3, micro_batch_size=1, **changes)
    code, _, err = train(line, tmp_path, inject=partial(count_collectives, size))
    assert code == 0, err
    model = GPT(GPTConfig(257, seq_len=16, n_layer=8, n_head=2, n_embd=32))
    gradients = 4 * sum(p.numel() for p in model.parameters())
    updates = 2 * sum(p.numel() for p, _ in model.matrices())
    expected = {"numbers": 12, "c10d.allreduce_.default": gradients}
    expected["c10d.allgather_.default"] = updates
    assert json.loads((tmp_path / "sent").read_text()) == [expected] * 3


SPEED_UPS = ["--no-flash --no-pad-vocab --no-fused", "--recompute --loss-chunk-tokens=5"]


@pytest.mark.parametrize("line", [*SPEED_UPS, "--bf16 --bf16-residual", "--fp16"])
def test_speed_ups(whole, data_dir, tmp_path, line):
    code, _, err = train([*flags(data_dir=data_dir, out_dir="run"), *line.split()], tmp_path)
    assert code == 0, err
    tolerance = 2e-2 if "16" in line else 1e-5
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1]), rel=tolerance)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=slow) for n in (1, 2)])
def test_measured_flags_are_kept(data_dir, tmp_path, ranks):
    """Of --bf16 and --flash, which nobody has typed."""
    line = flags(data_dir=data_dir, out_dir="run", bf16=None, flash=None, batch_tokens=768)
    code, out, err = train(line, tmp_path, ranks, kill_after=7)
    assert code == -signal.SIGKILL and " ms a block" in out, err
    code, out, err = train([*line, "--resume"], tmp_path, ranks)
    assert code == 0 and "changed" not in out and " ms a block" not in out, err
    chosen = {name: saved_state(tmp_path / "run")["flags"][name] for name in ("bf16", "flash")}
    assert train(flags(data_dir=data_dir, batch_tokens=768, **chosen), tmp_path, ranks)[0] == 0
    equal(tmp_path / "run", tmp_path / "out/001")


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batch_that_fits(data_dir, tmp_path, ranks):
    """A resume keeps it, since another one would change the last bits."""
    line = flags(data_dir=data_dir, out_dir="run", micro_batch_size=None, batch_tokens=384)
    code, _, err = train(line, tmp_path / "none", ranks, inject=partial(little_memory, 0))
    assert code == 2 and "--seq-len" in err and not (tmp_path / "none/run").exists()
    code, _, err = train(line, tmp_path, ranks, kill_after=7, inject=partial(little_memory, 5))
    assert code == -signal.SIGKILL, err
    code, out, err = train([*line, "--resume"], tmp_path, ranks)
    assert code == 0 and "not bit for bit" not in out, err
    assert saved_state(tmp_path / "run")["flags"]["micro_batch_size"] == 3  # 12 or 24, 6, 3
    line[line.index("run")] = "typed"
    assert train([*line, "--micro-batch-size=3"], tmp_path, ranks)[0] == 0
    equal(tmp_path / "run", tmp_path / "typed")


def little_memory(most: int, rank: int):
    """Injection: the last rank has memory for so many sequences."""
    forward = GPT.forward

    def forward_or_fail(self, idx, targets):
        if len(idx) > most and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, idx, targets)

    GPT.forward = forward_or_fail


# ---- torch.compile -------------------------------------------------------------------------------


@slow
def test_compile(data_dir, tmp_path):
    """To the bit, on two threads, which would add up an embedding's gradient in any order."""
    line = flags(data_dir=data_dir, out_dir="run", batch_tokens=3072, micro_batch_size=192)
    assert train(line, tmp_path / "eager")[0] == 0
    line += ["--compile", "--eval-every=4"]
    for name, kill_after in (("whole", None), ("killed", 7)):
        train(line, tmp_path / name, kill_after=kill_after, inject=two_threads)
    code, out, err = train([*line, "--resume"], tmp_path / "killed", inject=two_threads)
    assert code == 0 and "not bit for bit" not in out, err
    compiled = tmp_path / "killed/run"
    equal(compiled, tmp_path / "whole/run")
    assert losses(compiled) == pytest.approx(losses(tmp_path / "eager/run"), rel=1e-5)
    assert [*records(compiled, "sample")] == [*records(compiled, "val_loss")][1:] == [4, 8, 12]
    assert not any("_orig_mod" in name for name in weights(compiled))


def two_threads(rank: int):
    torch.set_num_threads(2)


# ---- The run -------------------------------------------------------------------------------------


def test_log_of_a_run(whole):
    first, *_, last = losses(whole[1]).values()
    assert first == pytest.approx(math.log(257), rel=0.03) and last < 0.8 * first
    log = [json.loads(line) for line in (whole[1] / "log.jsonl").read_text().splitlines()]
    assert log[0]["process"] > 0 and log[0]["flags"]["learning_rate"] == 0.01
    assert log[0]["flags"] == json.loads((whole[1] / "config.json").read_bytes())
    steps = [record for record in log if "loss" in record]
    assert [record["step"] for record in steps] == [*range(1, 13)]
    names = {"loss", "grad_norm", "learning_rate", "ms", "tokens_per_s", "time"}
    assert all(names <= record.keys() for record in steps) and log[-1]["done"] == 12
    assert [record["saved"] for record in log if "saved" in record] == [5, 10, 12]


def test_watching_changes_nothing(data_dir, tmp_path):
    often = {"eval_every": 5, "save_every": 2, "keep": 3, "eval_tokens": 100, "num_samples": 2}
    line = {"hellaswag": questions(tmp_path), "log_every": 1}
    plain = run(tmp_path, data_dir, "plain", dropout=0.1, eval_tokens=0, num_samples=0)
    watched = run(tmp_path, data_dir, dropout=0.1, **line, **often)
    assert losses(watched) == losses(plain) and digest(watched) == digest(plain)
    assert [*records(watched, "val_loss")] == [0, 5, 10, 12]
    assert [*records(watched, "hellaswag_acc")] == [*records(watched, "sample")] == [5, 10, 12]


def test_loss_not_finite(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", learning_rate=1e6, save_every=1)
    code, _, err = train(line, tmp_path, 2)
    last = max(losses(tmp_path / "run"))
    assert code == 1 and len(err.splitlines()) == 1 and f"step {last} is saved" in err, err
    assert (tmp_path / "rank1.err").read_text() == ""
    assert saved_state(tmp_path / "run")["step"] == last
    assert all(t.isfinite().all() for t in weights(tmp_path / "run").values())
    for name, moment in moments(tmp_path / "run").items():
        assert moment.isfinite().all(), name
    # a resume meets the same, and leaves the checkpoint that it began with
    state = next((tmp_path / "run").glob(f"step_*{last}/state.json"))
    before = state.stat()
    code, _, err = train(["--resume", "--out-dir", "run"], tmp_path)
    assert code == 1 and f"step {last + 1} has loss" in err and state.stat() == before, err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("line", ["--muon", "--no-muon --no-fused"])
def test_float16_overflow(data_dir, tmp_path, line, ranks):
    command = [*flags(data_dir=data_dir, out_dir="run", fp16=True, save_every=1), *line.split()]
    code, _, err = train(command, tmp_path, ranks, inject=large_scale)
    assert code == 0, err
    norms = records(tmp_path / "run", "grad_norm")
    skipped = [step for step, norm in norms.items() if norm is None]
    assert len(skipped) > 2 and skipped == [*range(1, len(skipped) + 1)]
    assert losses(tmp_path / "run")[len(skipped)] == pytest.approx(math.log(257), rel=0.03)
    assert losses(tmp_path / "run")[12] < 4.5
    scaler = saved_state(tmp_path / "run")["scaler"]
    assert scaler["scale"] == 2.0 ** (23 - len(skipped))
    assert scaler["_growth_tracker"] == 12 - len(skipped)


@slow
def test_dropout(tmp_path):
    """It differs by step and rank, and spares validation: all sequences are the same here, and
    nothing is learned."""
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}_0.bin", np.zeros(1000))
    still = {"learning_rate": 0.0, "steps": 2, "warmup_steps": 0, "num_samples": 0}
    found = []
    for dropout, ranks in ((0.0, 1), (0.2, 1), (0.2, 2)):
        changes = still | {"dropout": dropout, "batch_tokens": 32 * ranks}
        out_dir = run(tmp_path, tmp_path, f"{dropout} {ranks}", ranks, **changes)
        found.append((records(out_dir, "val_loss")[0], *losses(out_dir).values()))
    without, one, two = found
    assert without[0] == one[0] == pytest.approx(two[0], rel=1e-6)
    assert without[1] == without[2] and one[1] != one[2] and two[1] != two[2]
    assert one[1:] != pytest.approx(two[1:], rel=1e-6)


# ---- Weights of other runs and programs ----------------------------------------------------------


def test_init_from(whole, data_dir, tmp_path):
    """From its folder, or from one checkpoint: the first validation is the other's last. They are
    sampled before the first step, too, as the baseline; random weights would only write noise."""
    for source in (whole[1], checkpoints(whole[1])[0]):
        changes = {"init_from": source, "steps": 2, "warmup_steps": 1} | OF_WEIGHTS
        out_dir = run(tmp_path, data_dir, source.name, **changes)
        assert records(out_dir, "val_loss")[0] == records(whole[1], "val_loss")[12]
        assert [*records(out_dir, "sample")] == [0, 2] and [*records(whole[1], "sample")] == [12]


# ---- The user's mistakes: one line with the flag, exit code 2, nothing written -------------------


WEIGHTS = "--model gpt2 --init-from"
MISTAKES = {  # words in the line
    "--data-dir nowhere": "--data-dir nowhere",
    "--seq-len 4096 --batch-tokens 8192": "1009",
    "--hellaswag questions.jsonl": "line 1",
    "--out-dir mine": "--out-dir mine",  # a GPT-2 in Hugging Face's format, to be trained further
    "--init-from weights.pt": "weights.pt",
    f"{WEIGHTS} weights50257": "gpt2",
    f"{WEIGHTS} weights257 --seq-len 64": "64",
    f"{WEIGHTS} weights100": "256",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(line, data_dir, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for size in (100, 257, 50257):
        shape = GPTConfig(size, seq_len=16, n_layer=2, n_head=2, n_embd=32)
        Path(f"weights{size}").mkdir()
        checkpoint.save_weights(Path(f"weights{size}"), GPT(shape), None, "")
    Path("questions.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"], "label": 2}\n')
    Path("weights.pt").write_bytes(b"PK")
    Path("mine").mkdir()
    Path("mine/config.json").write_text("mine")
    err = refused([*flags(data_dir=data_dir, out_dir="new"), *line.split()], capfd)
    assert MISTAKES[line] in err and not Path("new").exists()


@pytest.mark.parametrize("mistake", ["--data-dir=nowhere", "--init-from=.", "--device=cuda"])
def test_mistake_on_two_ranks(data_dir, tmp_path, mistake):
    processes = start_ranks([*flags(data_dir=data_dir, out_dir="run"), mistake], tmp_path, 2)
    code, out, err = finish(processes, tmp_path)
    assert code == 2 and processes[1].exitcode == 2 and out == ""
    both = (err + (tmp_path / "rank1.err").read_text()).splitlines()
    assert len(both) == (2 if "device" in mistake else 1), both  # each has its own GPUs
    assert not (tmp_path / "run").exists()


def see_all(rank: int):
    """Injection: an edit has lost the mask."""
    scaled = torch.nn.functional.scaled_dot_product_attention
    network.flash_attention = lambda q, k, v, dropout=0.0: scaled(q, k, v)


def test_network_without_a_mask(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run")
    code, _, err = train(line, tmp_path, inject=see_all)
    assert code == 2 and "position 0 sees token 7" in err, err
    assert len(err.splitlines()) == 1 and not (tmp_path / "run").exists()
