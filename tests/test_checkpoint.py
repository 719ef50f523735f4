"""Tests ../support/checkpoint.py: what is saved is read back to the bit, or refused; and every
checkpoint is a Hugging Face model. The oracle for that is transformers."""

import errno
import io
import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NEEDS_POSIX, at_file_operation, die, flip, records
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_model import generate, hugging_face, tokens

import sample
from model import GPT, GPTConfig
from support import checkpoint
from support.checkpoint import SUMS, checkpoints, damaged_file, load_newest, newest, save_weights
from support.cli import RunError, UserError
from support.tokenizer import bytes_tokenizer

SHAPE = GPTConfig(vocab_size=257, seq_len=2, n_layer=1, n_head=1, n_embd=4)
SMALL = GPTConfig(vocab_size=997, seq_len=32, n_layer=2, n_head=12, n_embd=96)
SMALLEST = GPTConfig(vocab_size=3, seq_len=2, n_layer=1, n_head=1, n_embd=2)
WEIGHTS = "model.safetensors"
TEXT = "Hello,  wörld 🙂\n\tx1234 ."
slow = pytest.mark.slow


def saved(out_dir: Path, step: int = 7, keep: int = 2) -> Path:
    """A checkpoint of a network whose weights are all `step`; older ones are rotated."""
    model, state = GPT(SHAPE), {"step": step, "tensors": {"a": torch.full((9, 9), step)}}
    for p in model.parameters():
        p.data.fill_(step)
    checkpoint.save(out_dir, model, state, bytes_tokenizer(), "bytes")
    checkpoint.rotate(out_dir, step, keep, {})
    return out_dir / f"step_{step:06d}"


def is_whole(path: Path) -> bool:
    """Whether it is what saved() wrote for its step."""
    if damaged_file(path):
        return False
    tensors = load_file(path / "model.safetensors").values()
    return all(bool((tensor == checkpoint.step_of(path)).all()) for tensor in tensors)


# ---- What is saved is what is read ---------------------------------------------------------------


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def test_any_state_comes_back(tmp_path):
    tensors = [torch.randn(2, 3).bfloat16().t(), torch.zeros(0), torch.tensor(True)]
    tensors += [torch.arange(3), torch.tensor(math.nan)]
    state = {
        "step": 7,
        "none": None,
        "flags": {"x": True, "text": "12", "rate": 0.1 + 0.2, "empty": {}, "list": [1, -0.0]},
        "tensors": {f"a/{i}": tensor for i, tensor in enumerate(tensors)},
    }
    checkpoint.save(tmp_path, GPT(SMALLEST), state, None, "")
    _, found = load_newest(tmp_path)
    ours, theirs = state.pop("tensors"), found.pop("tensors")
    assert ours.keys() == theirs.keys() and repr(state) == repr(found)
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    for step, unknown in enumerate(({1}, torch.zeros(1)), 8):
        with pytest.raises(TypeError):  # at the first save
            state = {"step": step, "tensors": {}, "unknown": [unknown]}
            checkpoint.save(tmp_path, GPT(SMALLEST), state, None, "")
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000007"]


def stepped(beta: float) -> tuple[GPT, torch.optim.Optimizer]:
    """A network after a step of AdamW."""
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=beta, betas=(beta, beta), fused=True)
    model(torch.tensor([[1, 2]]), torch.tensor([[3, 4]])).backward()
    optimizer.step()
    return model, optimizer


def test_load_optimizer():
    """It takes over the moments, not the options, and changes no weight."""
    ours = checkpoint.optimizer_tensors(stepped(0.5)[1])
    model, optimizer = stepped(0.9)
    before = [p.clone() for p in model.parameters()]
    checkpoint.load_optimizer(optimizer, ours)
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.9)
    theirs = checkpoint.optimizer_tensors(optimizer)
    assert ours.keys() == theirs.keys() and len(ours) == 3 * len(before)
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    ours["optimizer/1/exp_avg"] = torch.zeros(1)
    with pytest.raises(UserError, match="1/exp_avg"):
        checkpoint.load_optimizer(optimizer, ours)
    del ours["optimizer/1/exp_avg"]
    with pytest.raises(UserError, match="1/exp_avg"):
        checkpoint.load_optimizer(optimizer, ours)


# ---- Every file operation of a save --------------------------------------------------------------


def is_full(place=None):
    if isinstance(place, Path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    raise OSError(errno.ENOSPC, "No space left on device")


def faulty_save(out_dir: Path, step: int, nth: int, fault: Callable):
    """In a process of its own: the nth operation on files has this fault."""
    at_file_operation(nth, fault)
    try:
        saved(out_dir, step)
    except RunError as error:
        os._exit(error.exit_code)
    os._exit(0)


@NEEDS_POSIX
@pytest.mark.parametrize(("fault", "code"), [(die, 137), pytest.param(is_full, 1, marks=slow)])
@pytest.mark.parametrize("is_damaged", [False, pytest.param(True, marks=slow)])
def test_fault_at_every_operation_of_a_save(tmp_path, fault, code, is_damaged):
    """Also where a step is saved for the second time, since its first checkpoint is damaged."""
    (tmp_path / "before").mkdir()
    for step in (1, 2, 3):
        last = saved(tmp_path / "before", step)
    new, codes = 3 if is_damaged else 4, []
    if is_damaged:
        flip(last / "model.safetensors", 9999)
    for nth in range(1, 45):
        out_dir = shutil.copytree(tmp_path / "before", tmp_path / str(nth))
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=faulty_save, args=(out_dir, new, nth, fault))
        process.start()
        process.join()
        codes.append(process.exitcode)
        if fault is die:
            checkpoint.lock(out_dir)  # removes what is unfinished
        assert not list(out_dir.glob("*.tmp"))
        assert is_whole(newest(out_dir))
        assert sum(map(is_whole, checkpoints(out_dir))) >= 2 - is_damaged
        assert codes[-1] or is_whole(out_dir / f"step_{new:06d}")
    assert codes[-1] == 0  # there is no such operation any more
    assert {*codes} == {0, code} and codes.count(code) > 12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_order_of_synchronization(tmp_path, monkeypatch):
    """So no power failure takes it: a disk may keep what is not synchronized in any order."""
    inodes, events = set(), []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def logged_fsync(fd):
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        inodes.add(path.stat().st_ino)
        events.extend(["synced"] if path == tmp_path else [])

    def logged_rename(old, new):
        assert {path.stat().st_ino for path in (Path(old), *Path(old).iterdir())} <= inodes
        events.append(Path(new).name)
        rename(old, new)

    def logged_rmtree(path, **options):
        events.extend([f"removed {path.name}"] if path.exists() and path.suffix != ".tmp" else [])
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    monkeypatch.setattr(shutil, "rmtree", logged_rmtree)
    for step in range(1, 4):
        saved(tmp_path, step)
    saves = [[f"step_00000{step}", "synced"] for step in range(1, 4)]
    assert events == [*itertools.chain(*saves), "removed step_000001"]


def test_rename_waits(tmp_path, monkeypatch):
    """As for a virus scanner that holds a file for a moment."""
    waited, rename = [], os.rename

    def held(old, new):
        if len(waited) < 3:
            raise PermissionError(errno.EACCES, "a scanner holds it")
        rename(old, new)

    monkeypatch.setattr(os, "rename", held)
    monkeypatch.setattr("time.sleep", waited.append)
    assert is_whole(saved(tmp_path, 1)) and 1 <= sum(waited) < 30


def test_rotation(tmp_path):
    for step in range(1, 8):
        (tmp_path / f"step_{step:06d}").mkdir()
    losses = {2: 3.0, 4: 2.0, 9: 1.0}  # 9 is not on the disk
    checkpoint.rotate(tmp_path, 6, 2, losses)  # those after it are damaged
    assert [checkpoint.step_of(path) for path in checkpoints(tmp_path)] == [7, 6, 5, 4]
    checkpoint.rotate(tmp_path, 7, 2, losses)
    assert [checkpoint.step_of(path) for path in checkpoints(tmp_path)] == [7, 6, 4]


# ---- Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=slow)])
def test_flipped_bits(tmp_path, stride):
    path, missed = saved(tmp_path), []
    assert not damaged_file(path)
    for file in sorted(path.iterdir()):
        size = 8 * file.stat().st_size
        for bit in {*range(0, size, stride), *range(size - 8, size)}:
            flip(file, bit)
            missed += [] if damaged_file(path) else [(file.name, bit)]
            flip(file, bit)
    assert not missed and not damaged_file(path)


def test_cut_or_missing_files(tmp_path):
    path = saved(tmp_path)
    subprocess.run(["sha256sum", "-c", "--strict", SUMS], cwd=path, check=True)
    for file in path.iterdir():
        content = file.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1, None):
            file.unlink() if size is None else file.write_bytes(content[:size])
            assert damaged_file(path), f"{file.name} of {size} bytes"
        file.write_bytes(content)
    needed = ("config.json", "model.safetensors", "state.json", "training.safetensors")
    lines = (path / SUMS).read_text().splitlines(keepends=True)
    for i, line in enumerate(lines):
        (path / SUMS).write_text("".join(lines[:i] + lines[i + 1 :]))
        assert damaged_file(path) or line.split()[1] not in needed
    (path / SUMS).write_text("".join(lines))
    assert not damaged_file(path)


def test_newest_good_checkpoint(tmp_path, capsys):
    with pytest.raises(RunError, match=str(tmp_path)):
        load_newest(tmp_path)
    paths = [saved(tmp_path, step, keep=9) for step in (1, 2, 3)]
    (paths[2] / "state.json").write_text("{}")
    assert load_newest(tmp_path)[0] == newest(tmp_path) == paths[1]
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and all("step_000003" in line and "state.json" in line for line in err)
    assert checkpoint.find_weights(str(tmp_path)).folder == paths[1]
    for path in paths:
        flip(path / "model.safetensors", 9999)
    for find in (newest, load_newest, checkpoint.find_weights):
        with pytest.raises(RunError, match=str(tmp_path)) as error:
            find(Path(tmp_path))
        err = capsys.readouterr().err
        assert error.value.exit_code == 1 and all(path.name in err for path in paths)
    assert checkpoints(tmp_path) == paths[::-1]  # nothing was removed


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_failing_disk_is_no_damage(tmp_path, monkeypatch, number):
    """The run ends, and nothing is removed: the same checkpoint may be read tomorrow."""
    paths = [saved(tmp_path, step) for step in (1, 2)]
    opened = io.open
    for name in (SUMS, "config.json", "model.safetensors", "state.json", "training.safetensors"):

        def fail(file, *args, name=name, **options):
            if Path(file) == paths[1] / name:
                raise OSError(number, os.strerror(number), str(file))
            return opened(file, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", fail)
            patch.setattr("io.open", fail)
            with pytest.raises(OSError, match=os.strerror(number) + ".*step_000002"):
                newest(tmp_path)
    assert all(map(is_whole, paths)) and len(list(tmp_path.iterdir())) == 2


# ---- A checkpoint in transformers ----------------------------------------------------------------


def check_in_transformers(path: Path):
    """Check that a checkpoint has our logits in transformers, our text, and our tokenizer."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    model, tokenizer = checkpoint.load_model(str(path))
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    V, T = model.config.vocab_size, model.config.seq_len
    idx = tokens(4, T, vocab_size=V)
    logits = oracle(idx).logits
    assert logits.shape == (4, T, V) and model.config.num_rows > V
    assert (model.logits(idx)[..., :V] - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert oracle.generation_config.eos_token_id == theirs.eos_token_id == tokenizer.end_of_text
    assert theirs.model_max_length == T
    ids = tokenizer.encode(TEXT)
    assert theirs(TEXT)["input_ids"] == ids and theirs.decode(ids) == TEXT
    prompt = idx[:1, :4]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    text = oracle.generate(prompt, attention_mask=mask, max_new_tokens=T - 4, **options)
    assert torch.equal(generate(model, prompt, T - 4, temperature=0), text)
    return oracle


def test_run_in_transformers(whole, data_dir):
    """Its validation loss there is the one that the run has logged."""
    oracle = check_in_transformers(whole[1] / "step_000012")
    shard = np.fromfile(data_dir / "val_000000.bin", "<u2")[512:].astype(np.int64)
    rows = torch.from_numpy(shard[: 512 + 1]).unfold(0, 17, 16)  # 32 sequences and targets
    with torch.no_grad():
        logits = oracle(rows[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert records(whole[1], "val_loss")[12] == pytest.approx(loss.item(), rel=1e-6)


@dataclass(frozen=True)
class Changed(GPTConfig):
    relu2: bool = False


def test_changed_network_in_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    shape = Changed(257, 16, 1, 1, 8, relu2=True)
    save_weights(tmp_path, GPT(shape), bytes_tokenizer(), "bytes")
    with pytest.raises(ValueError, match="relu2=True"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="relu2"):  # of a program that does not know the field
        checkpoint.find_weights(str(tmp_path))
    monkeypatch.setattr(checkpoint, "GPTConfig", Changed)  # its own program does
    assert checkpoint.find_weights(str(tmp_path)).shape == shape
    save_weights(tmp_path, GPT(replace(shape, relu2=False)), bytes_tokenizer(), "bytes")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


# ---- Hugging Face's folders ----------------------------------------------------------------------


def test_hugging_faces_folders(tmp_path):
    """As it may be stored: also without a prefix, as OpenAI's is, in many files, and with what
    old versions wrote."""
    oracle = hugging_face(SMALL)
    oracle.save_pretrained(tmp_path / "whole")
    oracle.transformer.save_pretrained(tmp_path / "plain")
    oracle.save_pretrained(tmp_path / "split", max_shard_size="100KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    theirs = {n: p for n, p in oracle.state_dict().items() if n != "lm_head.weight"}
    old = shutil.copytree(tmp_path / "whole", tmp_path / "old") / "model.safetensors"
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(2)}
    masks |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    head = {"lm_head.weight": theirs["transformer.wte.weight"].clone()}
    save_file(theirs | masks | head, old)
    for source in ("whole", "plain", "split", "old"):
        model, _ = checkpoint.load_model(str(tmp_path / source))
        assert model.config == SMALL and not model.lm_head.weight[997:].any()
        (tmp_path / source / "back").mkdir()
        save_weights(tmp_path / source / "back", model, None, "")
        back = load_file(tmp_path / source / "back/model.safetensors")
        assert back.keys() == theirs.keys()
        assert all(same_bits(back[name], theirs[name]) for name in back)
    idx = tokens(2, 32, vocab_size=997)
    logits = oracle(idx).logits
    for changes in ({}, {"pad_vocab": False}, {"seq_len": 16}):
        T = changes.get("seq_len", 32)
        model = GPT(replace(SMALL, **changes))
        checkpoint.load_weights(model, tmp_path / "whole")
        ours = model.logits(idx[:, :T])[..., :997]
        assert (ours - logits[:, :T]).abs().max() <= 1e-5 * logits.abs().max()


def edit_config(path: Path, **changes):
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | changes))


def edit_tensors(path: Path, **changes: torch.Tensor):
    changes = {f"transformer.{name}.bias": tensor for name, tensor in changes.items()}
    save_file(load_file(path / WEIGHTS) | changes, path / WEIGHTS)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


BROKEN = {  # what is done to the folder, and a word that the line must have
    "a shape": (lambda f: edit_tensors(f, ln_f=torch.zeros(7)), "ln_f.bias"),
    "a name": (lambda f: edit_tensors(f, extra=torch.zeros(2)), "extra.bias"),
    "nan": (lambda f: edit_tensors(f, ln_f=torch.tensor([0.0, math.nan])), "finite"),
    "cut": (lambda f: os.truncate(f / WEIGHTS, 300), "hf"),
    "a pickle": (lambda f: torch.save({"wpe": Evil()}, f / WEIGHTS), "hf"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "wte"),
    "relu": (lambda f: edit_config(f, activation_function="relu"), "relu"),
    "llama": (lambda f: edit_config(f, model_type="llama", train_gpt2={"shape": {}}), "llama"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_folders(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    act, word = BROKEN[what]
    Path("hf").mkdir()
    save_weights(Path("hf"), GPT(SMALLEST), None, "")
    act(Path("hf"))
    assert sample.main(["hf", "--prompt="]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err and os.listdir() == ["hf"]
