"""Tests ../support/tokenizer.py: Hugging Face's tools have the tokenizers that we have."""

import random
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, records, run

from dataloader import VOCAB_SIZES
from support.tokenizer import (
    load_tokenizer,
    missing_vocab,
    provide_vocab,
    token_lengths,
    vocab_cure,
)

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
    ours, lengths = load_tokenizer(name), token_lengths(name)
    for text in TEXTS:
        ids = np.array(ours.encode(text), int)
        assert lengths[ids].sum() == len(text.encode())
    assert not lengths[VOCAB_SIZES[name] - 1 :].any()


def test_without_its_vocabulary_there_is_no_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    load_tokenizer.cache_clear()
    assert load_tokenizer("gpt2") is load_tokenizer("unknown") is token_lengths("unknown") is None
    load_tokenizer.cache_clear()


def test_a_sample_goes_on_from_the_prompt_and_is_always_the_same(data_dir, tmp_path):
    texts = []
    for name in ("a", "b"):
        out_dir = run(tmp_path, data_dir, name, prompt="abc ", sample_tokens=200)
        texts.append(records(out_dir, "sample")[12])
    assert texts[0] == texts[1] and texts[0].startswith("abc ") and len(texts[0]) > 100


def test_missing_vocab_names_the_files_that_tiktoken_looks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    names = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    assert missing_vocab() == [tmp_path / name for name in names]
    assert all(name in vocab_cure() for name in (*names, "TIKTOKEN_CACHE_DIR"))
    for name in names:
        (tmp_path / name).touch()
    assert missing_vocab() == []


@NEEDS_GPT2
def test_a_checkpoint_provides_the_vocabulary_where_tiktoken_has_none(tmp_path, monkeypatch):
    files = load_tokenizer("gpt2").files(24)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    assert len(missing_vocab()) == 2
    provide_vocab(tmp_path / "nothing" / "model.safetensors")
    assert len(missing_vocab()) == 2
    load_tokenizer.cache_clear()
    assert load_tokenizer("gpt2") is None
    (tmp_path / "other").mkdir()  # whose vocabulary is not OpenAI's
    for name in files:
        (tmp_path / "other" / name).write_bytes(files[name].replace(b"the", b"eht"))
    provide_vocab(tmp_path / "other")
    assert len(missing_vocab()) == 2
    provide_vocab(tmp_path / "model.safetensors")  # they are beside it
    assert missing_vocab() == []
    assert load_tokenizer("gpt2").files(24) == files
