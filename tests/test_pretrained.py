"""Tests ../support/pretrained.py: every checkpoint is a Hugging Face model; what others
wrote is read as they mean it or refused in one line, never executed. The oracle is transformers."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NEEDS_GPT2, NEEDS_POSIX, flags, records, run, state_after
from safetensors.torch import load_file, save_file
from test_model import TINY, generate, hugging_face, spread, tokens

import model as model_module
import sample as sample_program
import train_gpt2
from model import GPT, SHAPES, GPTConfig
from support import pretrained as pretrained_module
from support.card import model_card
from support.checkpoint import save
from support.files import FolderLock
from support.pretrained import formula_loss, hf_config, hf_weights, load_weights, read_weights
from support.tokenizer import load_tokenizer

ROOT = Path(train_gpt2.__file__).parent
SMALL = replace(SHAPES["gpt2"], n_layer=2, vocab_size=997, seq_len=32)
UNSET = dict.fromkeys(("model", "n_layer", "n_head", "n_embd", "seq_len"))
TEXT = "Hello,  wörld 🙂\n\tx1234 ."
SMALLEST = GPTConfig(vocab_size=3, seq_len=2, n_layer=1, n_head=1, n_embd=2)


def loaded(path: Path, **changes) -> GPT:
    pretrained = read_weights(path)
    model = GPT(replace(pretrained.shape, **changes))
    load_weights(model, pretrained)
    return model


def sample(capsys, source: Path | str) -> tuple[int, str]:
    """Return the exit code of a sample from source, and its error: one line if it is a mistake."""
    capsys.readouterr()
    line = ["--sample-tokens=3", "--temperature=0", "--prompt="]
    code = sample_program.main([str(source), *line])
    out, err = capsys.readouterr()
    assert code in (0, 2)
    if code:
        assert out == "" and err.startswith("sample.py: error: ")
        assert err.count("\n") == 1
    return code, err


# ---- A checkpoint in transformers ----------------------------------------------------------------


def check_in_transformers(path: Path, tokenizer: str):
    """Check that a checkpoint has our logits in transformers, and a tokenizer that is ours."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    model, theirs = loaded(path), transformers.AutoTokenizer.from_pretrained(path)
    V, T = model.config.vocab_size, model.config.seq_len
    idx = tokens(4, T, vocab_size=V)
    logits = oracle(idx).logits
    assert logits.shape == (4, T, V) and model.config.num_rows > V
    assert (model.logits(idx)[..., :V] - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert oracle.generation_config.eos_token_id == theirs.eos_token_id == V - 1
    assert theirs.model_max_length == T
    ids, text = load_tokenizer(tokenizer).encode(TEXT), theirs(TEXT)["input_ids"]
    assert text == ids and theirs.decode(ids) == TEXT
    return oracle


def test_each_checkpoint_of_a_run_is_the_same_network_in_transformers(whole, data_dir):
    """Its validation loss there is the one that the run has logged."""
    for ranks in (1, 2):
        oracle = check_in_transformers(whole[ranks] / "step_000012", "bytes")
        shard = np.fromfile(data_dir / "val_000000.bin", "<u2")[512:].astype(np.int64)
        rows = torch.from_numpy(shard[: 512 + 1]).unfold(0, 17, 16)  # 32 sequences and targets
        with torch.no_grad():
            logits = oracle(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        assert records(whole[ranks], "val_loss")[12] == pytest.approx(loss.item(), rel=1e-6)


@NEEDS_GPT2
def test_a_checkpoint_with_gpt2s_tokens_is_the_same_network_in_transformers(tmp_path):
    model = GPT(GPTConfig(seq_len=16, n_layer=2, n_head=2, n_embd=8))
    optimizer = torch.optim.AdamW(model.parameters())
    path = save(FolderLock(tmp_path), model, optimizer, state_after(12, "gpt2"))
    check_in_transformers(path, "gpt2")


def copy_of_program(folder: Path, edits: dict[str, dict[str, str]]):
    """Copy train_gpt2.py and all that it imports, with edits: file -> {old: new}."""
    shutil.copytree(ROOT / "support", folder / "support")
    for path in ROOT.glob("*.py"):
        text = path.read_text("utf-8")
        for old, new in edits.get(path.name, {}).items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / path.name).write_text(text, "utf-8")


def after(line: str, *lines: str) -> dict[str, str]:
    return {line: "\n".join([line, *lines])}


FORK = {  # a field that GPT-2 does not have: each block subtracts what it should add
    "model.py": after("    pad_vocab: bool = True", "    negated: bool = False")
    | after("        self.mlp = MLP(config)", "        self.negated = config.negated")
    | after(
        "        x = x + self.drop(self.attn(self.ln_1(x).to(x.dtype), cache))",
        "        if self.negated:",
        "            return x - self.drop(self.mlp(self.ln_2(x)))",
    ),
    "config.py": after(
        '    n_embd: int = flag(768, "channels of the residual stream", "refuse", min=1)',
        "    negated: bool = flag(False, 'of the fork', 'refuse')",
    ),
}


@pytest.mark.slow
def test_a_network_that_is_no_gpt2_is_refused_by_transformers_and_known_by_its_own_code(
    whole, data_dir, tmp_path, capsys
):
    transformers = pytest.importorskip("transformers")
    copy_of_program(tmp_path, FORK)

    def fork(*more: str, **changes) -> dict[int, float]:
        """Return the validation losses of a run of the fork."""
        line = flags(data_dir=data_dir, **changes)
        command = [sys.executable, "train_gpt2.py", *line, *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return records(tmp_path / changes["out_dir"], "val_loss")

    first = fork("--negated", out_dir="a", steps=3)
    plain = records(whole[1], "val_loss")
    assert abs(first[0] / plain[0] - 1) > 1e-5  # it is another network
    with pytest.raises(ValueError):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "step_000003")
    # Ours, which does not know the field, says that; the fork knows its own, and ours.
    code, err = sample(capsys, tmp_path / "a")
    assert code == 2 and "another version of this code" in err and "negated" in err
    fork(out_dir="a", steps=4, resume=True)
    for source, loss in {whole[1]: plain[12], tmp_path / "a" / "step_000003": first[3]}.items():
        losses = fork(out_dir=source.name, init_from=source, steps=3, **UNSET)
        assert losses[0] == pytest.approx(loss, rel=1e-6)


# ---- --init-from ---------------------------------------------------------------------------------


def test_a_folder_of_hugging_faces_loads_and_goes_back_bit_for_bit(tmp_path):
    """As it may be stored: also without a prefix, as OpenAI's is, by torch, and in many files."""
    oracle = hugging_face(SMALL)
    oracle.save_pretrained(tmp_path / "whole")
    oracle.transformer.save_pretrained(tmp_path / "plain")
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "old")
    torch.save(oracle.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    oracle.save_pretrained(tmp_path / "split", max_shard_size="100KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    theirs = {n: p for n, p in oracle.state_dict().items() if n != "lm_head.weight"}
    (tmp_path / "old split").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "old split")
    for i, name in enumerate(theirs):
        torch.save({name: theirs[name]}, tmp_path / "old split" / f"{i}.bin")
    index = json.dumps({"weight_map": {name: f"{i}.bin" for i, name in enumerate(theirs)}})
    (tmp_path / "old split" / "pytorch_model.bin.index.json").write_text(index)
    files = ("whole/model.safetensors", "split/model.safetensors.index.json", "old/config.json")
    for source in ("whole", "plain", "old", "split", "old split", *files):
        model = loaded(tmp_path / source)
        assert model.config == SMALL and not model.lm_head.weight[997:].any()
        back = hf_weights(model)
        assert back.keys() == theirs.keys()
        assert all(torch.equal(back[name], theirs[name]) for name in back)
    idx = tokens(2, 32, vocab_size=997)
    logits = oracle(idx).logits
    for changes in ({}, {"pad_vocab": False}, {"seq_len": 16}):
        T = changes.get("seq_len", 32)
        ours = loaded(tmp_path / "whole", **changes).logits(idx[:, :T])[..., :997]
        assert (ours - logits[:, :T]).abs().max() <= 1e-5 * logits.abs().max()


def test_a_run_begins_where_the_weights_it_is_given_are(whole, data_dir, tmp_path):
    """Those of a run's folder, and of one of its checkpoints."""
    for name, source in {"a": whole[1], "b": whole[1] / "step_000012"}.items():
        out_dir = run(tmp_path, data_dir, name, init_from=source, steps=3, **UNSET)
        expected = records(whole[1], "val_loss")[12]
        assert records(out_dir, "val_loss")[0] == pytest.approx(expected, rel=1e-6)


def test_cached_greedy_text_is_hugging_faces(tmp_path):
    oracle = hugging_face(replace(SMALL, seq_len=256, n_embd=96), spread=0.05)
    oracle.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for seed in range(8):
        prompt = tokens(1, 5 + seed, vocab_size=997, seed=seed)
        theirs = oracle.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(generate(model, prompt, 200, temperature=0), theirs)


def nanogpt_checkpoint(config: GPTConfig, bias: bool = True, **changes) -> tuple[GPT, dict]:
    """Return a model, and it as nanoGPT saves one that is compiled; changes are of its tensors."""
    model = GPT(replace(config, pad_vocab=False))
    if bias:
        spread(model)
    weights = {n: p for n, p in model.state_dict().items() if bias or "bias" not in n}
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # its mask
    weights |= {f"transformer.{name}.weight": tensor for name, tensor in changes.items()}
    weights = {f"_orig_mod.module.{name}": tensor for name, tensor in weights.items()}
    args = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    args |= {"block_size": config.seq_len, "vocab_size": config.vocab_size, "dropout": 0.1}
    saved = {"model": weights, "model_args": args | {"bias": bias}, "iter_num": 5}
    return model, saved | {"best_val_loss": torch.tensor(3.0)}


@pytest.mark.parametrize("place", ["", "data/mine"])
def test_nanogpts_weights_have_the_alphabet_of_their_data(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs(place or ".", exist_ok=True)
    shape = GPTConfig(vocab_size=3, seq_len=16, n_layer=1, n_head=1, n_embd=8)
    torch.save(nanogpt_checkpoint(shape)[1] | {"config": {"dataset": "mine"}}, "ckpt.pt")
    for letters, code in (("ab", 2), ("abc", 0)):  # the first is another data set's
        meta = {"stoi": {letter: i for i, letter in enumerate(letters)}}
        Path(place, "meta.pkl").write_bytes(pickle.dumps(meta))
        line = ["ckpt.pt", "--sample-tokens=3", "--prompt="]
        assert sample_program.main(line) == code
        assert "put nanoGPT's meta.pkl beside them" in capsys.readouterr().err or code == 0


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_loads(tmp_path, bias):
    model, saved = nanogpt_checkpoint(TINY, bias)
    torch.save(saved, tmp_path / "ckpt.pt")
    same = loaded(tmp_path / "ckpt.pt", pad_vocab=False).logits(tokens(2, 16))
    assert torch.equal(same, model.logits(tokens(2, 16)))


@pytest.mark.parametrize("module", ["__main__", "model"])
def test_a_checkpoint_of_build_nanogpt_loads_without_its_code(tmp_path, monkeypatch, module):
    """It holds an object of a class that this process must not need."""
    names = ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"]
    theirs = make_dataclass("GPTConfig", names)
    theirs.__module__ = module
    model = GPT(replace(TINY, vocab_size=50304, pad_vocab=False, n_embd=8))
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], "GPTConfig", theirs, raising=False)
        saved = {"model": model.state_dict(), "config": theirs(16, 50304, 2, 2, 8), "step": 9}
        torch.save(saved, tmp_path / "model_00009.pt")
    other = loaded(tmp_path / "model_00009.pt")
    assert other.config == replace(model.config, vocab_size=50257, pad_vocab=True)
    assert torch.equal(other.lm_head.weight[:50257], model.lm_head.weight[:50257])
    assert not other.lm_head.weight[50257:].any()


# ---- Hostile files, through main: exit 2, one line, nothing executed -----------------------------


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def hf_folder(folder: Path, config: GPTConfig = SMALLEST) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = hf_config(config, "unknown")
    del settings["train_gpt2"]
    (folder / "config.json").write_text(json.dumps(settings))
    weights = hf_weights(GPT(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor):
    path = folder / "model.safetensors"
    changes = {f"transformer.{name}.bias": tensor for name, tensor in changes.items()}
    save_file(load_file(path) | changes, path)


def by_torch(folder: Path, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def write(folder: Path, content: bytes):
    (folder / "model.safetensors").write_bytes(content)


def write_index(folder: Path, file: str):
    (folder / "model.safetensors").unlink()
    index = json.dumps({"weight_map": {"wte.weight": file}})
    (folder / "model.safetensors.index.json").write_text(index)


BROKEN = {  # what the line must say: what is done to the folder
    "ln_f.bias has the shape (7,)": lambda f: edit_tensors(f, ln_f=torch.zeros(7)),
    "transformer.extra.bias": lambda f: edit_tensors(f, extra=torch.zeros(2)),
    "finite": lambda f: edit_tensors(f, ln_f=torch.tensor([0.0, math.nan])),
    "SafetensorError": lambda f: os.truncate(f / "model.safetensors", 300),
    "holds no GPT-2": lambda f: (f / "model.safetensors").unlink(),
    "but model.safetensors": lambda f: (f / "config.json").unlink(),
    "a pointer of Git LFS": lambda f: write(f, b"version https://git-lfs.github.com/spec/v1"),
    "a web page": lambda f: write(f, b"\n<!DOCTYPE html><html></html>"),
    "there is no such file": lambda f: write_index(f, "none.safetensors"),
    "hf is not a readable GPT-2": lambda f: write_index(f, "../config.json"),  # only its own files
    "could run code": lambda f: by_torch(f, {"wpe.weight": Evil()}),
    "'Tensor' object has no": lambda f: by_torch(f, torch.ones(3)),
    "is not a readable GPT-2": lambda f: by_torch(f, {"h.0.mlp.c_proj.weight": [5]}),
    "activation_function relu": lambda f: edit_config(f, activation_function="relu"),
    "model_type llama": lambda f: edit_config(f, model_type="llama"),
    "for 1000000000 layers": lambda f: edit_config(f, n_layer=10**9),
    "wpe.weight": lambda f: edit_config(f, n_positions=2**40),  # takes no memory that it claims
    "wte.weight": lambda f: edit_config(f, vocab_size=2**40),
    "another version": lambda f: edit_config(f, train_gpt2={"shape": {"rotary": True}}),
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_folder_is_one_line_and_runs_no_code(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    BROKEN[words](hf_folder(Path("hf")))
    code, err = sample(capsys, "hf")
    assert code == 2 and words in err and os.listdir() == ["hf"]


def test_a_file_that_is_no_checkpoint_is_one_line_and_runs_no_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plain = nanogpt_checkpoint(SMALLEST)[1]
    for content in (
        b"",
        b"no archive",
        pickle.dumps({"model": 1}),
        pickle.dumps(Evil(), protocol=2),
        [1],
        {"model": {}},
        plain | {"model": {5: torch.ones(2), "x": Evil()}},
        plain | {"model": {5: torch.ones(2)}},
        plain | {"model_args": plain["model_args"] | {"n_layer": 10**9}},
        b"\x89HDF\r\n",
        np.array([20240326, 3], "<i4").tobytes(),
    ):
        if isinstance(content, bytes):
            Path("ckpt.pt").write_bytes(content)
        else:
            torch.save(content, "ckpt.pt")
        code, err = sample(capsys, "ckpt.pt")
        assert code == 2 and "ckpt.pt" in err and os.listdir() == ["ckpt.pt"]


@NEEDS_POSIX
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_what_is_no_file_is_refused_at_once(tmp_path, capsys, name):
    for kind in ("fifo", "folder", "/dev/zero", name, "nowhere"):
        folder = hf_folder(tmp_path / kind.strip("/").replace("/", "-"))
        if name == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(kind)  # name: a loop
        for source in (folder, path):
            assert sample(capsys, source)[0] == 2


def test_a_name_of_nothing_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("\0", "a\0b", "x" * 5000, "a/b/c", "-", " ", "~", "a\nb"):
        assert sample(capsys, name)[0] == 2
    assert not os.listdir()


# ---- A changed network ---------------------------------------------------------------------------


def relu(mlp, x):
    return mlp.c_proj(mlp.c_fc(x).relu())


def without_past(q, k, v, dropout=0.0):
    return v


def parallel(block, x, cache=None):
    return x + block.attn(block.ln_1(x), cache) + block.mlp(block.ln_2(x))


EDITS = [(model_module.MLP, "forward", relu), (model_module.Block, "forward", parallel)]
EDITS += [(model_module, "flash_attention", without_past)]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_no_field_shows_is_found_by_what_it_computes(edit, monkeypatch):
    monkeypatch.setattr(*edit)
    formula_loss.cache_clear()
    settings = hf_config(GPTConfig(), "bytes")
    formula_loss.cache_clear()
    assert "GPT-2 changed by an edit of model.py: see README.md" in settings["model_type"]


@pytest.mark.parametrize("edit", [*EDITS, ()])
def test_weights_that_model_py_does_not_compute_are_named(edit, tmp_path, monkeypatch, capsys):
    """Those of other programs, too, which record no formula."""
    hf_folder(tmp_path / "theirs")
    edit_config(hf_folder(tmp_path / "ours"), **hf_config(SMALLEST, "unknown"))
    torch.save(nanogpt_checkpoint(TINY)[1], tmp_path / "ckpt.pt")
    if edit:
        monkeypatch.setattr(*edit)
    formula_loss.cache_clear()
    for name in ("theirs", "ours", "ckpt.pt"):
        read_weights(tmp_path / name)
        line = f"model.py does not compute the network of {tmp_path / name}: its losses"
        assert (line in capsys.readouterr().err) == bool(edit)
    formula_loss.cache_clear()


def test_the_formula_is_the_one_of_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    made, row = [], torch.arange(17)[None] * 7 % 64
    monkeypatch.setattr(
        pretrained_module, "GPT", lambda config: made.append(GPT(config)) or made[0]
    )
    torch.set_float32_matmul_precision("medium")  # bfloat16 on some CPUs
    formula_loss.cache_clear()
    assert formula_loss() == pretrained_module.GPT2_LOSS
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    settings = hf_config(made[0].config, "unknown")
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_dict(settings)).eval()
    oracle.load_state_dict(hf_weights(made[0]), strict=False)
    with torch.no_grad():
        loss = F.cross_entropy(oracle(row[:, :-1]).logits[0], row[0, 1:])
    assert f"{loss:.4f}" == pretrained_module.GPT2_LOSS


@dataclass(frozen=True)
class Changed(GPTConfig):
    relu2: bool = False


def test_a_changed_network_is_refused_for_a_reason_unless_its_change_is_mapped(monkeypatch):
    """transformers prints an unknown model_type."""
    monkeypatch.setattr(pretrained_module, "GPTConfig", Changed)
    shape = Changed(vocab_size=257, seq_len=16, n_layer=1, n_head=1, n_embd=8, relu2=True)
    plain = replace(shape, relu2=False)
    state = state_after(3, "bytes")
    cases = (shape, set(), True), (shape, {"relu2"}, False), (plain, set(), False)
    for config, mapped, is_changed in cases:
        monkeypatch.setattr(pretrained_module, "MAPPED", mapped)
        settings = hf_config(config, "bytes")
        model = GPT(config)
        card = model_card(model, state)
        assert (
            "GPT-2 changed by relu2=True: see README.md" in settings["model_type"]
        ) == is_changed
        assert (settings["model_type"] == "gpt2") == (not is_changed)
        assert card.startswith("---\nlibrary_name: transformers") == (not is_changed)
        assert ("with relu2=True, so transformers refuses it" in card) == is_changed
        saved = sum(tensor.numel() for tensor in hf_weights(model).values())
        assert f"{saved:,} parameters" in card
