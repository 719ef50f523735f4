"""Tests ../support/export.py."""

import dataclasses
import math
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_GPT2, NEEDS_POSIX, records, run
from test_train_gpt2 import hugging_face_folder
from test_weights import SMALLEST, hf_folder

import train_gpt2
from model import GPT, GPTConfig
from support import export
from support.checkpoint import checkpoints, read_checkpoint
from support.export import figures, history
from support.text import codec
from support.weights import Source


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
    loss = f"{records(out_dir, 'val_loss')[12]:.4f}"
    assert f"| val_loss | 12 | {loss} |" in card
    assert f"Trained from scratch for 12 steps of 192 tokens on {data_dir}." in card
    assert f"The last validation, at step 12: a loss of {loss} nats per token." in card
    assert train_gpt2.main(["--init-from", "hf", "--export", "again"]) == 0
    assert Path("again/model.safetensors").read_bytes() == Path("hf/model.safetensors").read_bytes()


@NEEDS_GPT2
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


def kept(folder: Path) -> dict[Path, tuple]:
    """What is in a folder, but when it was last read: following a link sets that of the link."""
    names = ("st_ino", "st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")
    return {p: tuple(getattr(p.lstat(), name) for name in names) for p in folder.iterdir()}


def test_an_export_never_replaces_what_is_there(tmp_path, capsys):
    source = hf_folder(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("dangling", "loop"):
        (tmp_path / name).symlink_to({"dangling": "nowhere", "loop": "loop"}[name])
    (tmp_path / "link").symlink_to("empty")
    before = kept(tmp_path)
    for name in ("empty", "file", "dangling", "loop", "link"):
        code, err = exported(capsys, source, tmp_path / name)
        assert code == 2 and f"{name} exists: name a new folder" in err
    assert kept(tmp_path) == before


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


@NEEDS_GPT2
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


def bytes_export(tmp_path: Path, capsys) -> Path:
    shape = dataclasses.replace(SMALLEST, vocab_size=257, seq_len=24)
    assert exported(capsys, hf_folder(tmp_path / "source", shape), tmp_path / "hf")[0] == 0
    return tmp_path / "hf"


def test_the_tokenizer_of_bytes_in_transformers_is_ours(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bytes_export(tmp_path, capsys))
    ours = codec("bytes")
    assert len(tokenizer) == 257 and tokenizer.model_max_length == 24
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 256
    assert not tokenizer.clean_up_tokenization_spaces  # older versions take spaces out by it
    for i in range(257):
        assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(i)) == i
        assert tokenizer.decode([i]) == ours.decode(i).decode(errors="replace")
    every = "".join(chr(i) for i in range(0x2100)) + "\ud7ff\ue000\ufeff\uffff\U0001f642\U0010ffff"
    for text in (every, "Hello,  wörld 🙂\n\tx1234 .", " a , it 's", "<|endoftext|>", ""):
        ids = ours.encode(text)
        assert tokenizer(text)["input_ids"] == [*ids] and tokenizer.decode([*ids]) == text
    rng = random.Random(0)
    for content in (rng.randbytes(rng.randint(1, 12)) for _ in range(500)):
        assert tokenizer.decode([*content]) == content.decode(errors="replace")


@NEEDS_POSIX
def test_every_file_of_an_export_is_as_open_as_the_umask_lets_it_be(tmp_path, capsys):
    before = os.umask(0o027)
    try:
        folder = bytes_export(tmp_path, capsys)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    names = {"README.md", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert modes == dict.fromkeys(names | {"model.safetensors"}, 0o640)
    assert folder.stat().st_mode & 0o777 == 0o750


def test_the_card_tells_the_hub_what_it_is(tmp_path, capsys):
    hub = pytest.importorskip("huggingface_hub")
    facts = hub.ModelCard.load(bytes_export(tmp_path, capsys) / "README.md").data.to_dict()
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    assert facts == expected


def source_of(tokenizer: str, flags: dict, step: int = -1) -> Source:
    return Source(Path("out/1/step.pt"), GPTConfig(), {}, tokenizer, flags, step)


def test_a_card_says_how_the_network_was_trained():
    """From the first weights, in steps of every size that the run had; no damaged record counts."""
    records = [
        None, {"flags": [1]}, {"flags": {"init_from": 5, "batch_tokens": "1"}},
        {"flags": {"init_from": "gpt2", "batch_tokens": 8192}}, {"step": 0, "val_loss": 3.5},
        {"flags": {"init_from": "out/1/a.pt", "batch_tokens": 1024}}, {"step": 9, "val_loss": 2.5},
        {"step": 99, "val_loss": 1.5},
    ]  # fmt: skip
    flags = {"init_from": "", "batch_tokens": 8192, "data_dir": "data/book"}
    known = "GPT-2 with 12 layers, 12 heads and 768 channels: 124,439,808 parameters, up to 1,024"
    known += " tokens at a time. Written by train_gpt2.py from out/1/step.pt."
    trained = "Trained from gpt2 for 20 steps of 1,024 or 8,192 tokens on data/book."
    last = "The last validation, at step 9: a loss of 2.5000 nats per token."
    words = history(GPTConfig(), source_of("gpt2", flags, 20), records)
    assert words == f"{known} {trained} {last}"
    own = {"init_from": "", "batch_tokens": 2048, "data_dir": ""}
    trained = "Trained from scratch for 20 steps of 2,048 tokens on Python's own source."
    assert history(GPTConfig(), source_of("bytes", own, 20), []) == f"{known} {trained}"
    assert history(GPTConfig(), source_of("gpt2", {}), []) == known


def usage(card: str) -> str:
    return re.search("```python\n(.*)```\n", card, re.DOTALL)[1]


@pytest.mark.parametrize(
    "vocab_size", [257, pytest.param(50257, marks=[NEEDS_GPT2, pytest.mark.slow])]
)
def test_the_lines_of_a_card_run(tmp_path, capsys, vocab_size):
    pytest.importorskip("transformers")
    shape, folder = GPTConfig(vocab_size, 24, 1, 1, 8), tmp_path / "it's new" / "hf"
    assert exported(capsys, hf_folder(tmp_path / "source", shape), folder)[0] == 0
    lines = usage((folder / "README.md").read_text())
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"The") and len(done.stdout) > len("The\n")


def test_a_card_promises_no_tokenizer_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "missing_vocab", lambda: [Path("encoder.json")])
    shape, folder = dataclasses.replace(SMALLEST, vocab_size=50257), Path("hf")
    files = export.texts(shape, source_of("gpt2", {}), folder, [])
    assert {*files} == {"config.json", "README.md"}
    assert 'AutoTokenizer.from_pretrained("openai-community/gpt2")' in files["README.md"].decode()
    files = export.texts(SMALLEST, source_of("unknown", {}), folder, [])
    assert {*files} == {"config.json", "README.md"}
    assert "which tokenizer" in (card := files["README.md"].decode()).lower()
    assert "AutoTokenizer" not in card


def test_git_ignores_every_folder_that_the_readmes_commands_write():
    root = Path(__file__).parent.parent
    text, ignored = ((root / name).read_text("utf-8") for name in ("README.md", ".gitignore"))
    written = {*re.findall(r"--(?:out-dir|data-dir|export) (\w+/)", text)}
    assert written == {"out/", "data/", "hf/"} and written <= {*ignored.split()}
