"""Tests ../support/tokenizer.py: Hugging Face's tools have the tokenizers that we have."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, flags, prepare, records, run

from dataloader import VOCAB_SIZES
from support import tokenizer
from support.tokenizer import load_gpt2, load_tokenizer, missing_vocab, vocab_cure

ROOT = Path(tokenizer.__file__).parent.parent
EITHER = pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=NEEDS_GPT2)])
TEXTS = [
    "".join(chr(i) for i in range(0x2100)) + "\ud7ff\ue000\ufeff\uffff\U0001f642\U0010ffff",
    "Hello,  wörld 🙂\n\tx1234 .",
    " a , it 's",
    "",
]


def from_hugging_face(folder: Path, name: str):
    transformers = pytest.importorskip("transformers")
    for file, content in load_tokenizer(name).files(24).items():
        (folder / file).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@EITHER
def test_a_checkpoints_tokenizer_in_transformers_is_ours(tmp_path, name):
    theirs, ours = from_hugging_face(tmp_path, name), load_tokenizer(name)
    end = VOCAB_SIZES[name] - 1
    assert len(theirs) == end + 1 and theirs.model_max_length == 24
    assert theirs.eos_token_id == theirs.bos_token_id == end
    assert theirs.convert_ids_to_tokens(end) == "<|endoftext|>" == theirs.decode([end])
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
        assert ours.decode(ids) == text
    # An end of text inside a text is ordinary text.
    assert max(ours.encode("<|endoftext|>")) < end
    if name == "bytes":  # Hugging Face's of GPT-2 takes it for the end
        assert theirs("<|endoftext|>")["input_ids"] == ours.encode("<|endoftext|>")
    rng = random.Random(0)
    for _ in range(500):  # parts of characters too
        ids = rng.choices(range(end), k=rng.randint(1, 12))
        content = b"".join(map(ours.token_bytes, ids))
        assert theirs.decode(ids) == content.decode(errors="replace")


@EITHER
def test_a_token_is_as_long_as_its_bytes(name):
    ours = load_tokenizer(name)
    lengths = ours.lengths
    for text in TEXTS:
        ids = np.array(ours.encode(text), int)
        assert lengths[ids].sum() == len(text.encode())
    assert not lengths[VOCAB_SIZES[name] - 1 :].any()


def test_a_sample_goes_on_from_the_prompt_and_is_always_the_same(data_dir, tmp_path):
    texts = []
    for name in ("a", "b"):
        out_dir = run(tmp_path, data_dir, name, prompt="abc ", sample_tokens=200)
        texts.append(records(out_dir, "sample")[12])
    assert texts[0] == texts[1] and texts[0].startswith("abc ") and len(texts[0]) > 100


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A process that has loaded nothing, on a machine without GPT-2's vocabulary."""
    monkeypatch.setattr(tokenizer, "TOKENIZERS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))


def test_without_its_files_there_is_no_tokenizer(fresh, tmp_path):
    assert load_tokenizer("gpt2") is load_tokenizer("unknown") is None
    names = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    assert set(missing_vocab()) == {tmp_path / "cache" / name for name in names}
    assert all(name in vocab_cure() for name in (*names, "TIKTOKEN_CACHE_DIR"))
    (tmp_path / "cache").mkdir()
    for name in names:
        (tmp_path / "cache" / name).touch()
    assert missing_vocab() == []


@NEEDS_GPT2
def test_gpt2s_tokens_are_tiktokens():
    import tiktoken

    ours, theirs = load_tokenizer("gpt2"), tiktoken.get_encoding("gpt2")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.tokens == [theirs.decode_bytes([token]) for token in range(50257)]


@NEEDS_GPT2
def test_a_folder_with_openais_two_files_has_the_tokenizer_and_no_other_has(tmp_path, request):
    files = load_tokenizer("gpt2").files(24)
    request.getfixturevalue("fresh")
    (tmp_path / "other").mkdir()
    for name in files:
        (tmp_path / name).write_bytes(files[name])
        (tmp_path / "other" / name).write_bytes(files[name].replace(b"the", b"eht"))
    for folder in (tmp_path / "nothing", tmp_path / "other"):
        load_gpt2(folder)
        assert load_tokenizer("gpt2") is None
    load_gpt2(tmp_path)
    assert load_tokenizer("gpt2").files(24) == files
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@NEEDS_GPT2
def test_a_checkpoint_is_enough_to_resume_to_sample_and_to_evaluate(tmp_path):
    """Without tiktoken's cache, and without a network."""
    assert prepare(tmp_path / "data", "--input", __file__, "--tokenizer", "gpt2") == 0
    out_dir = run(tmp_path, tmp_path / "data", steps=1, warmup_steps=0)
    env = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    env |= {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "https_proxy": "http://127.0.0.1:9"}
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    resume = flags(data_dir=tmp_path / "data", out_dir=out_dir, steps=2, warmup_steps=0)
    for line in (
        [*ranks, ROOT / "train_gpt2.py", *resume, "--resume"],
        [ROOT / "sample.py", out_dir, "--prompt", "a", "--sample-tokens", "2"],
        [ROOT / "train_gpt2.py", "--out-dir", out_dir, "--eval-only"],
    ):
        command = [sys.executable, *map(str, line)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout
    assert (
        records(out_dir, "bits_per_byte")[2] and "(no sample" not in records(out_dir, "sample")[2]
    )
    names = ("vocab.json", "merges.txt", "tokenizer_config.json")
    old, new = out_dir / "step_000001", out_dir / "step_000002"
    assert all((old / name).read_bytes() == (new / name).read_bytes() for name in names)
    assert not (tmp_path / "cache").exists()
