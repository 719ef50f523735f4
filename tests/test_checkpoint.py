"""Tests ../support/checkpoint.py: what is saved is read back to the bit, or refused by name."""

import hashlib
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import (
    NEEDS_POSIX,
    digest,
    each_flipped,
    flags,
    losses,
    saved_state,
    state_after,
    train,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import sample
import train_gpt2
from config import TrainConfig
from model import GPT, GPTConfig
from support import checkpoint, plan, pretrained
from support.checkpoint import (
    DamagedCheckpoint,
    check_read_back,
    checkpoints,
    load_model,
    save,
    verify,
)
from support.ending import NoGoodCheckpoint, UserError
from support.files import FolderLock
from support.pretrained import load_weights, read_weights
from support.ranks import World
from train_gpt2 import make_optimizer

SHAPE = GPTConfig(vocab_size=5, seq_len=2, n_layer=1, n_head=1, n_embd=4)
LN_F = "transformer.ln_f.weight"
MUON = pytest.mark.parametrize("muon", [False, True])


def after_steps(count: int, muon: bool = False) -> tuple[GPT, torch.optim.Optimizer]:
    """Return a network and its optimizer after so many steps."""
    model = GPT(SHAPE)
    config = TrainConfig(muon=muon, bf16=False, steps=9, warmup_steps=0, learning_rate=0.01)
    optimizer = make_optimizer(model, config, World(0, 1, torch.device("cpu")))
    for _ in range(count):
        make_step(model, optimizer)
    return model, optimizer


def make_step(model: GPT, optimizer: torch.optim.Optimizer):
    idx = torch.tensor([[1, 2], [3, 4]])
    model(idx, idx.flip(1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path, step: int = 7, muon: bool = False) -> Path:
    return save(FolderLock(folder), *after_steps(3, muon), state_after(step))


def with_digests(path: Path) -> list[Path]:
    """The files of a checkpoint that SHA256SUMS covers, or must: all but itself and the card."""
    return [file for file in sorted(path.iterdir()) if file.name not in ("SHA256SUMS", "README.md")]


# ---- What is saved is what is read ---------------------------------------------------------------


@MUON
def test_a_saved_network_and_its_optimizer_go_on_to_the_bit(tmp_path, muon):
    model, optimizer = after_steps(3, muon)
    path = save(FolderLock(tmp_path), model, optimizer, state_after(3))
    check_read_back(path, model, optimizer)
    names = {name for name, p in model.named_parameters() for _ in optimizer.state[p]}
    assert names == {name for name, _ in model.named_parameters()}
    copy, its_optimizer = after_steps(1, muon)  # has a state of its own, which must go
    for group in its_optimizer.param_groups:
        group["lr"] = 0.02
    load_weights(copy, read_weights(path))
    checkpoint.load_optimizer(path, copy, its_optimizer)
    assert all(group["lr"] == 0.02 for group in its_optimizer.param_groups)  # this command's
    for m, o in ((model, optimizer), (copy, its_optimizer)):
        for group in o.param_groups:
            group["lr"] = 0.01
        make_step(m, o)
    assert all(map(torch.equal, model.parameters(), copy.parameters()))
    for p, q in zip(model.parameters(), copy.parameters(), strict=True):
        state, other = optimizer.state[p], its_optimizer.state[q]
        assert state.keys() == other.keys()
        assert all(torch.equal(state[key], other[key]) for key in state)
    assert not copy.lm_head.weight[SHAPE.vocab_size :].any()  # padded rows


def test_a_save_that_does_not_read_back_is_an_error(tmp_path, monkeypatch):
    """In a weight, in the optimizer, in the shape, or by a forgotten name."""
    model, optimizer = after_steps(3)
    path = save(FolderLock(tmp_path), model, optimizer, state_after(3))
    moment = optimizer.state[model.transformer.ln_f.bias]["exp_avg"]
    for tensor in (model.transformer.wpe.weight, moment):
        before = tensor.clone()
        tensor.data += 1
        with pytest.raises(RuntimeError, match="differs when read back"):
            check_read_back(path, model, optimizer)
        tensor.data.copy_(before)
        check_read_back(path, model, optimizer)
    model.config = GPTConfig(vocab_size=5, seq_len=2, n_layer=1, n_head=2, n_embd=4)
    with pytest.raises(RuntimeError, match="n_head=2"):
        check_read_back(path, model, optimizer)
    every = pretrained.hf_weights(model)
    kept = {name: tensor for name, tensor in every.items() if "ln_f" not in name}
    monkeypatch.setattr(pretrained, "hf_weights", lambda _: kept)
    path = save(FolderLock(tmp_path), model, optimizer, state_after(4))
    with pytest.raises(UserError, match="missing .*ln_f"):
        check_read_back(path, model, optimizer)


def test_python_loads_the_network_and_the_tokenizer_of_a_run(whole, tmp_path):
    for name in (whole[1], whole[1] / "step_000010", whole[1] / "step_000012/model.safetensors"):
        model, tokenizer = load_model(str(name))
        assert tokenizer.encode("a") == [97] and not model.training
        idx = torch.tensor([tokenizer.encode("def")])
        assert model.logits(idx).shape == (1, 3, model.config.num_rows)
    saved = read_weights(whole[1] / "step_000012").weights
    assert_close(model.transformer.ln_f.weight, saved[LN_F])
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="step_000009 is not there: .* has step_000012, step_0000"):
        load_model(str(whole[1] / "step_000009"))


def test_a_checkpoint_has_a_card_that_people_can_edit(whole):
    path = whole[1] / "step_000012"
    card = (path / "README.md").read_text(encoding="utf-8")
    assert "2 layers, 2 heads, 32 channels" in card and "257 tokens (bytes)" in card
    assert "12 of 12 steps of 192 tokens" in card and "pipeline(" in card
    ends = json.loads((path / "generation_config.json").read_text())
    assert ends == {"bos_token_id": 256, "eos_token_id": 256}
    assert (
        f"After step 12: {json.loads((whole[1] / 'summary.json').read_text())['val_loss']:.4f}"
        in card
    )
    (path / "README.md").write_text("mine")
    verify(path)
    (path / "README.md").write_text(card)


@NEEDS_POSIX
def test_others_may_read_all_files_of_a_checkpoint_or_none(tmp_path):
    modes = {file.stat().st_mode for file in saved(tmp_path).iterdir()}
    assert len(modes) == 1


@NEEDS_POSIX
def test_a_disk_without_modes_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("such as of a drive in the cloud")

    monkeypatch.setattr(os, "chmod", refuse)
    assert saved(tmp_path).is_dir()


def test_a_network_that_can_not_be_saved_fails_before_the_first_step(
    data_dir, tmp_path, monkeypatch, capsys
):
    hf_weights = pretrained.hf_weights

    def forgetful(model: GPT) -> dict:
        return {name: p for name, p in hf_weights(model).items() if "ln_f" not in name}

    monkeypatch.setattr(pretrained, "hf_weights", forgetful)
    assert train_gpt2.main(flags(data_dir=data_dir, out_dir=tmp_path / "run")) == 2
    assert "ln_f" in capsys.readouterr().err and not (tmp_path / "run").exists()


# ---- Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_a_checkpoint_is_refused(tmp_path, stride, record_property):
    path, count = saved(tmp_path), 0
    verify(path)
    for file in [*with_digests(path), path / "SHA256SUMS"]:
        for bit in each_flipped(file, range(0, 8 * file.stat().st_size, stride)):
            count += 1
            with pytest.raises(DamagedCheckpoint, match="is damaged"):
                verify(path)
                raise AssertionError(f"{file.name}, bit {bit}")
    record_property("flips", count)
    assert count > 500


def test_a_file_that_is_cut_or_missing_is_refused(tmp_path):
    path = saved(tmp_path)
    for file in [*with_digests(path), path / "SHA256SUMS"]:
        content = file.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1, None):
            file.unlink() if size is None else file.write_bytes(content[:size])
            with pytest.raises(DamagedCheckpoint, match=file.name):
                verify(path)
        file.write_bytes(content)
    verify(path)


def test_the_newest_good_checkpoint_is_taken_and_each_damaged_one_named(tmp_path, capsys):
    assert checkpoint.newest(tmp_path) is None
    paths = [saved(tmp_path, step) for step in (1, 2, 3)]
    assert checkpoint.newest(tmp_path) == paths[2]
    (paths[2] / "state.json").write_text("{}")
    assert checkpoint.newest(tmp_path) == paths[1]
    assert checkpoint.find_weights(str(tmp_path)) == paths[1]
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and err.count(str(paths[2] / "state.json")) == 2
    with pytest.raises(UserError, match="state.json is damaged"):  # it was asked for by name
        checkpoint.find_weights(str(paths[2]))
    for path in paths[:2]:
        (path / "model.safetensors").unlink()
    with pytest.raises(NoGoodCheckpoint, match=str(tmp_path)):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    "kept", ["config.json model.safetensors", "*.json *.safetensors", "[!os]*", "[!o]*"]
)
def test_what_a_friend_was_sent_has_weights_but_can_not_be_resumed(whole, tmp_path, kept, capsys):
    run = tmp_path / "run"
    for step in whole[1].glob("step_*"):
        for pattern in kept.split():
            for file in step.glob(pattern):
                (run / step.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, run / step.name)
        (run / step.name / "optimizer.safetensors").unlink(missing_ok=True)
    newest = run / "step_000012"
    for name in (run, newest, newest / "model.safetensors"):
        model, _ = load_model(str(name))
        assert model.config.n_layer == 2
    with pytest.raises(NoGoodCheckpoint):
        checkpoint.newest(run)
    err = capsys.readouterr().err
    assert re.search(
        "step_000012 lacks optimizer.*, which a resume needs, but not --init-from;", err
    )
    checkpoint.rotate(run, 0, 1, {})
    assert len(checkpoints(run)) == len(checkpoints(whole[1]))  # somebody may want these weights
    content = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(content[:-1] + b"?")
    is_whole = not (newest / "SHA256SUMS").exists()  # then nobody can know
    with nullcontext() if is_whole else pytest.raises(DamagedCheckpoint, match="model.safetensors"):
        load_model(str(newest))


@pytest.mark.parametrize("reader", ["sample.py", "load_model", "--init-from", "--eval-only"])
@pytest.mark.parametrize("function", ["checkpoint.verify", "pretrained.read_file"])
def test_a_reader_whose_checkpoint_a_live_run_removes_looks_again(
    function, reader, whole, tmp_path, monkeypatch, capsys
):
    """Wherever that happens: here, at the first call of a function that reads it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole[1], "run")
    module = {"checkpoint": checkpoint, "pretrained": pretrained}[function.split(".")[0]]
    read = getattr(module, function.split(".")[1])

    def rotated(path, *args):
        if os.path.isdir("run/step_000012"):
            shutil.rmtree("run/step_000012")
        return read(path, *args)

    monkeypatch.setattr(module, function.split(".")[1], rotated)
    if reader == "sample.py":
        assert sample.main(["run", "--prompt", "a", "--sample-tokens", "2"]) == 0
    elif reader == "load_model":
        load_model("run")
    elif reader == "--init-from":
        found, _ = plan.find_start({"init_from": "run"}, Path("new"))
        assert found.path == Path("run/step_000010")
    else:
        assert train_gpt2.main(["--eval-only", "--out-dir", "run"]) == 0
        assert "step_000010: 512 validation tokens" in capsys.readouterr().out
    said = f"sample.py: sampling from {Path('run/step_000010')}\n"
    assert capsys.readouterr().err == (said if reader == "sample.py" else "")


def test_names_that_only_look_like_checkpoints_are_none(tmp_path):
    numbers = ("\u00b2", "7", "", "0000007", "\u0660" * 5 + "\u0661", "9" * 99, "-00001", "1e0005")
    for name in (*(f"step_{number}" for number in numbers), "step_000002.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000003").touch()
    assert not checkpoints(tmp_path)
    path = saved(tmp_path, 1234567)
    assert checkpoints(tmp_path) == [path]


def test_a_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 8):
        saved(tmp_path, step)
    checkpoint.rotate(tmp_path, 7, 2, {2: 3.0, 4: 2.0, 9: 1.0})  # 9 is not on the disk
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == [7, 6, 4]


# ---- Other versions of the code ------------------------------------------------------------------


def rewrite(path: Path, name: str, change):
    """Change a file of a checkpoint as another version would have written it: its digest fits."""
    file = path / name
    if name.endswith(".json"):
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
    else:
        tensors = load_file(file)
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        change(tensors)
        save_file(tensors, file)
    files = with_digests(path)
    sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    (path / checkpoint.SUMS).write_text("".join(sums))
    verify(path)


def with_other_name(tensors: dict):
    for name in [name for name in tensors if "ln_f.weight" in name]:
        tensors[name.replace("ln_f", "norm")] = tensors.pop(name)


def with_other_shape(config: dict):
    config["train_gpt2"]["shape"]["rotary"] = True


OTHER_VERSIONS = {
    "a format": ("state.json", lambda state: state.update(format=1)),
    "a field of the shape": ("config.json", with_other_shape),
    "names of weights": ("model.safetensors", with_other_name),
    "names in the optimizer": ("optimizer.safetensors", with_other_name),
}


@pytest.fixture
def two_steps(data_dir, tmp_path) -> list[str]:
    """The flags of a run that has two steps and goes on to the third."""
    line = flags(data_dir=data_dir, out_dir=tmp_path / "run", steps=2, warmup_steps=0)
    code, _, err = train(line, tmp_path)
    assert code == 0, err
    return ["--out-dir", str(tmp_path / "run"), "--resume", "--steps", "3"]


@pytest.mark.parametrize("cosine", [True, False])
def test_a_checkpoint_of_the_format_before_goes_on(two_steps, tmp_path, cosine):
    def as_it_was(state: dict):
        state.update(format=3, typed={"steps": 2})
        config = state["config"]
        config.update(cosine=cosine, micro_batch_size=state.pop("micro_batch_size"))
        del config["schedule"], config["decay_share"]

    rewrite(checkpoints(tmp_path / "run")[0], "state.json", as_it_was)
    code, out, err = train(two_steps, tmp_path)
    assert code == 0 and "not bit for bit" not in out, err
    schedule = saved_state(tmp_path / "run")["config"]["schedule"]
    assert schedule == ("cosine" if cosine else "constant")


@pytest.mark.parametrize("what", OTHER_VERSIONS)
def test_what_another_version_wrote_is_said_to_be_that(two_steps, tmp_path, what):
    path = checkpoints(tmp_path / "run")[0]
    rewrite(path, *OTHER_VERSIONS[what])
    code, _, err = train(two_steps, tmp_path)
    assert code == 2
    assert err.count("\n") == 1 and "another version of this code" in err and str(path) in err
    assert "damaged" not in err
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000002"]


EDITED = {
    "no step": ("state.json", lambda state: state.pop("step")),
    "another step": ("state.json", lambda state: state.update(step=3)),
    "a negative position": ("state.json", lambda state: state.update(position=-1)),
    "a text as a number": ("state.json", lambda state: state["config"].update(steps="2")),
    "a number as a text": ("state.json", lambda state: state["config"].update(data_dir=2)),
    "a list of losses": ("state.json", lambda state: state.update(val_losses=[1.5])),
    "no loss": ("state.json", lambda state: state.update(losses={"1": None})),
    "no environment": ("state.json", lambda state: state.update(environment={})),
}


@pytest.mark.parametrize("what", EDITED)
def test_what_somebody_has_edited_is_refused_though_its_digest_fits(two_steps, tmp_path, what):
    path = checkpoints(tmp_path / "run")[0]
    rewrite(path, *EDITED[what])
    code, _, err = train(two_steps, tmp_path)
    assert code == 2 and err.count("\n") == 1 and str(path) in err


@NEEDS_POSIX
@pytest.mark.parametrize(
    "name", ["another", "../another", "merges.txt", "state.json", "SHA256SUMS"]
)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_no_pipe_or_device_in_a_checkpoint_is_read(two_steps, tmp_path, name, kind):
    """It would wait forever, or fill the memory."""
    file = checkpoints(tmp_path / "run")[0] / name
    file.unlink(missing_ok=True)
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(kind)
    if "another" in name:
        with open(checkpoints(tmp_path / "run")[0] / "SHA256SUMS", "a") as sums:
            sums.write(f"{'0' * 64}  {name}\n")
    code, _, err = train(two_steps, tmp_path)
    assert code == 7 and "is damaged" in err


def test_a_field_that_a_checkpoint_lacks_has_its_default(two_steps, tmp_path):
    """As if pad_vocab and --shuffle had been added after it was saved, and --old removed."""

    def older(state: dict):
        del state["config"]["shuffle"], state["config"]["top_k"]
        state["config"]["old"] = 5

    def without_padding(config: dict):
        del config["train_gpt2"]["shape"]["pad_vocab"]

    newest = checkpoints(tmp_path / "run")[0]
    kept = {file.name: file.read_bytes() for file in newest.iterdir()}
    results = []
    for changes in ([], [("state.json", older), ("config.json", without_padding)]):
        for name, content in kept.items():
            (newest / name).write_bytes(content)
        for change in changes:
            rewrite(newest, *change)
        code, _, err = train(two_steps, tmp_path)
        assert code == 0, err
        results.append((digest(tmp_path / "run"), losses(tmp_path / "run")[3]))
        checkpoint.remove(checkpoints(tmp_path / "run")[0])
    assert results[0] == results[1]
