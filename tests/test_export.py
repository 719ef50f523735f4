"""Tests ../support/export.py."""

import dataclasses
import math
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import records, run
from test_train_gpt2 import hugging_face_folder
from test_weights import SMALLEST, hf_folder

import train_gpt2
from model import GPT, GPTConfig
from support import export
from support.checkpoint import checkpoints, read_checkpoint
from support.export import figures
from support.files import missing_vocab


def test_an_exported_run_is_the_same_network_in_transformers(data_dir, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    out_dir = run(tmp_path, data_dir)
    monkeypatch.chdir(tmp_path)
    Path("hf.tmp").mkdir()  # mine
    assert train_gpt2.main(["--resume", "--out-dir", str(out_dir), "--export", "hf"]) == 0
    assert {*os.listdir()} == {"run", "hf", "hf.tmp", "rank0.out", "rank0.err"}
    oracle = transformers.AutoModelForCausalLM.from_pretrained("hf").eval()
    assert oracle.config.eos_token_id == 256
    saved = read_checkpoint(checkpoints(out_dir)[0])
    shape = {f.name: saved["identity"][f.name] for f in fields(GPTConfig)}
    model = GPT(GPTConfig(**shape))
    model.load_state_dict(saved["model"])
    idx = torch.arange(32).view(2, 16) * 8
    logits = oracle(idx).logits
    assert (model.logits(idx)[..., :257] - logits).abs().max() <= 1e-5 * logits.abs().max()
    card = Path("hf/README.md").read_text()
    assert f"| val_loss | 12 | {records(out_dir, 'val_loss')[12]:.4f} |" in card
    assert train_gpt2.main(["--init-from", "hf", "--export", "again"]) == 0
    assert Path("again/model.safetensors").read_bytes() == Path("hf/model.safetensors").read_bytes()


@pytest.mark.skipif(bool(missing_vocab()), reason="GPT-2's vocabulary is not at hand")
def test_an_export_brings_gpt2s_tokenizer(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.chdir(tmp_path)
    hugging_face_folder(GPT(GPTConfig(seq_len=16, n_layer=1, n_head=1, n_embd=8)), Path("tiny"))
    assert train_gpt2.main(["--init-from", "tiny", "--export", "hf"]) == 0
    tokenizer, text = transformers.AutoTokenizer.from_pretrained("hf"), "Hello,  wörld 🙂\n\tx1234"
    assert tokenizer(text)["input_ids"] == tiktoken.get_encoding("gpt2").encode(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def exported(capsys, source: Path, folder: Path) -> tuple[int, str]:
    code = train_gpt2.main(["--init-from", str(source), "--export", str(folder)])
    return code, capsys.readouterr().err


def test_an_export_never_replaces_what_is_there(tmp_path, capsys):
    source = hf_folder(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("dangling", "loop"):
        (tmp_path / name).symlink_to({"dangling": "nowhere", "loop": "loop"}[name])
    (tmp_path / "link").symlink_to("empty")
    before = {path: path.lstat() for path in tmp_path.iterdir()}
    for name in ("empty", "file", "dangling", "loop", "link"):
        code, err = exported(capsys, source, tmp_path / name)
        assert code == 2 and f"{name} exists: name a new folder" in err
    assert {path: path.lstat() for path in tmp_path.iterdir()} == before


def test_a_folder_that_appears_while_an_export_is_written_stays(tmp_path, capsys, monkeypatch):
    source, folder, write = hf_folder(tmp_path / "source"), tmp_path / "new", export.texts
    for content in ([], ["mine"]):

        def appear(*args):
            folder.mkdir()
            for name in content:  # noqa: B023
                (folder / name).touch()
            return write(*args)

        monkeypatch.setattr(export, "texts", appear)
        code, err = exported(capsys, source, folder)
        assert code == 2 and err.count("\n") == 1
        assert {*os.listdir(tmp_path)} == {"source", "new"} and os.listdir(folder) == content
        shutil.rmtree(folder)


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path, capsys, monkeypatch):
    """In the order of the calls: every file is synced, then the folder, then the rename, then the
    folders that hold its name."""
    events = []

    def noting(name, function, what):
        def call(*args):
            events.append((name, what(*args)))
            return function(*args)

        monkeypatch.setattr(os, name, call)

    noting("fsync", os.fsync, lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")))
    noting("rename", os.rename, lambda a, b: (Path(a), Path(b)))
    assert exported(capsys, hf_folder(tmp_path / "source"), tmp_path / "a" / "b" / "hf")[0] == 0
    at, (new, folder) = next((i, args) for i, (name, args) in enumerate(events) if name == "rename")
    before, after = ([path for _, path in part] for part in (events[:at], events[at + 1 :]))
    names = os.listdir(folder)
    assert {path.name.removesuffix(".tmp") for path in before[:-1]} >= {*names}
    assert before[-1] == new and {*after} == {*folder.parents[:3]}
    assert len({(folder / name).stat().st_mode for name in names}) == 1


def test_an_export_on_a_full_disk_leaves_nothing(tmp_path, capsys):
    resource = pytest.importorskip("resource")
    source, before = hf_folder(tmp_path / "source"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        code, err = exported(capsys, source, tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 6 and re.search("--export .*hf can't be written: File too large\n", err)
    assert os.listdir(tmp_path) == ["source"]


def test_the_card_takes_of_a_log_what_is_a_number():
    records = [
        {"step": 1, "loss": 3.5, "val_loss": 3.0}, {"step": 2, "loss": math.nan}, None, 5, [], "x",
        {"step": 2, "loss": "1"}, {"step": 2, "loss": None}, {"step": 2, "loss": [1.0]},
        {"step": True, "loss": 1.0}, {"step": "2", "loss": 1.0}, {"step": math.nan, "loss": 1.0},
        {"step": 2.0, "loss": 1.0}, {"step": 2, "loss": 10**400}, {"step": -1, "loss": 1.0},
        {"step": 2, "perplexity": math.inf}, {"step": 2, "bits_per_byte": 4.0}, {"loss": 1.0},
        {"step": 9, "loss": 1.0}, {"stdp": 2, "loss": 1.0}, {"step": [], "loss": 1.0},
    ]  # fmt: skip
    expected = {"loss": (1, 3.5), "val_loss": (1, 3.0), "bits_per_byte": (2, 4.0)}
    assert figures(records, 2) == expected


@pytest.mark.skipif(bool(missing_vocab()), reason="GPT-2's vocabulary is not at hand")
def test_transformers_knows_an_exports_end_of_text_and_its_length(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    shape = dataclasses.replace(SMALLEST, vocab_size=50257, seq_len=24)
    folder = tmp_path / "hf"
    assert exported(capsys, hf_folder(tmp_path / "source", shape), folder)[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == model.generation_config.bos_token_id == 50256
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 50256
    assert tokenizer.model_max_length == 24
