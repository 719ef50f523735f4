"""Tests ../support/tokenizer.py: Hugging Face's tools have the tokenizers that we have."""

import json
import random
from pathlib import Path

import pytest
from conftest import NEEDS_GPT2, flags, prepare, run, train

from support.cli import UserError
from support.tokenizer import (
    ALPHABET,
    END_OF_TEXT,
    Tokenizer,
    bytes_tokenizer,
    find_tokenizer,
    gpt2_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

GPT2 = pytest.param("gpt2", marks=NEEDS_GPT2)
ANY = pytest.mark.parametrize("name", ["bytes", "bpe", "other", GPT2])
TEXTS = [
    "".join(chr(i) for i in range(0x2100)) + "\ud7ff\ue000\ufeff\uffff\U0001f642\U0010ffff",
    "Hello,  wörld 🙂\n\tx1234 .",
    " a , it 's",
    "",
]


def trained(vocab_size: int = 400) -> Tokenizer:
    """Return a tokenizer trained on this file and some letters with accents."""
    return train_tokenizer([Path(__file__).read_text(), "aéèü ñandú 東京 " * 20], vocab_size)


def other() -> Tokenizer:
    """Return a tokenizer like that of a GPT-2 in another language: special tokens come first, the
    ids are in no order of merges, and documents end with </s>."""
    ours = trained()
    names = [name for name in ours.vocab if name != END_OF_TEXT]
    random.Random(1).shuffle(names)
    special = ["<s>", "</s>", "<名>"]
    return Tokenizer({name: i for i, name in enumerate(special + names)}, ours.merges, "</s>")


KINDS = {"bytes": bytes_tokenizer, "bpe": trained, "other": other, "gpt2": gpt2_tokenizer}


def save(ours: Tokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file, content in ours.files(24).items():
        (folder / file).write_bytes(content)
    return folder


def odd_text(rng: random.Random) -> str:
    """Return up to 30 characters and words of all kinds."""
    kinds = ["the", " the", "'ll", "  ", "\t\n", "123", " def", "é", "\u00a0", "\u2003", "東", "🙂"]
    kinds += ["\0", "\ufeff", "\u0301", "\r\n", "_", "<|endoftext|", "\ufffd", "\U0010ffff", "ñan"]
    kinds += [chr(rng.randrange(0xD800)) for _ in range(10)]
    return "".join(rng.choices(kinds, k=rng.randrange(31)))


@ANY
def test_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    ours = KINDS[name]()
    theirs = transformers.AutoTokenizer.from_pretrained(save(ours, tmp_path))
    assert len(theirs) == ours.size and theirs.model_max_length == 24
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text
    assert theirs.convert_ids_to_tokens(ours.end_of_text) == ours.end
    assert theirs.decode([ours.end_of_text]) == ours.end
    rng = random.Random(0)
    for text in TEXTS + [odd_text(rng) for _ in range(300)]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
        assert ours.decode(ids) == text
    # An end of text inside a text is ordinary text.
    assert ours.end_of_text not in ours.encode(ours.end)
    if name != "gpt2":  # OpenAI's takes it for the end
        assert theirs(ours.end)["input_ids"] == ours.encode(ours.end)
    ordinary = [i for i, token in enumerate(ours.vocab) if token.isascii() and token[0] != "<"]
    for _ in range(500):  # parts of characters too
        ids = rng.choices(ordinary, k=rng.randint(1, 12))
        content = b"".join(ours.tokens[i] for i in ids)
        assert theirs.decode(ids) == content.decode(errors="replace")


@ANY
def test_folders(tmp_path, name):
    """In our files, or in a tokenizer.json alone."""
    transformers = pytest.importorskip("transformers")
    ours = KINDS[name]()
    theirs = transformers.AutoTokenizer.from_pretrained(save(ours, tmp_path / "a"))
    assert read_tokenizer(tmp_path / "a").files(24) == ours.files(24)
    assert find_tokenizer(tmp_path / "a", ours.name).sha256 == ours.sha256
    with pytest.raises(UserError, match="bpe-0123"):  # its ids would be other words
        find_tokenizer(tmp_path / "a", "bpe-0123")
    theirs.save_pretrained(tmp_path / "b")
    if (tmp_path / "b/merges.txt").exists():
        (tmp_path / "b/vocab.json").unlink()
        (tmp_path / "b/merges.txt").unlink()
    again = read_tokenizer(tmp_path / "b")
    assert (again.sha256, again.end) == (ours.sha256, ours.end)


WRONG = {
    "sentence pieces": {"vocab.json": {"▁the": 0}, "merges.txt": "▁t he"},
    "no end": {"vocab.json": {c: i for i, c in enumerate(ALPHABET)}, "merges.txt": ""},
    "a merge of nothing": {"vocab.json": bytes_tokenizer().vocab, "merges.txt": "a b"},
    "two with one id": {"vocab.json": bytes_tokenizer().vocab | {"a": 98}, "merges.txt": ""},
    "too many": {"vocab.json": {"a": 65536, END_OF_TEXT: 1}, "merges.txt": ""},
    "WordPiece": {"tokenizer.json": {"model": {"type": "WordPiece", "vocab": {}}}},
    "lower case": {
        "tokenizer.json": {
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            "pre_tokenizer": {"type": "ByteLevel"},
            "normalizer": {"type": "Lowercase"},
        }
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_another_kind(case, tmp_path):
    for name, content in WRONG[case].items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"in {tmp_path} is not a byte-level BPE"):
        read_tokenizer(tmp_path)


def test_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    assert gpt2_tokenizer() is find_tokenizer(tmp_path, "gpt2") is None
    assert find_tokenizer(tmp_path, "bpe-0123456789ab") is None
    assert find_tokenizer(tmp_path, "bytes").name == "bytes"


@NEEDS_GPT2
def test_tiktoken():
    import tiktoken

    ours, theirs = gpt2_tokenizer(), tiktoken.get_encoding("gpt2")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.tokens[:50257] == [theirs.decode_bytes([token]) for token in range(50257)]


@pytest.mark.parametrize("first", [None, "<none>", {"content": "</s>"}])
def test_end_of_text(first, tmp_path):
    theirs = other()
    save(theirs, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": first}))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert read_tokenizer(tmp_path).end_of_text == theirs.end_of_text


@pytest.mark.slow
def test_gpt2_of_another_language(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    theirs = other()
    save(theirs, tmp_path / "theirs")
    shape = {"vocab_size": theirs.size + 3, "n_positions": 16, "n_embd": 8, "n_layer": 1}
    config = transformers.GPT2Config(**shape, n_head=2, eos_token_id=theirs.end_of_text)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    flags_ = {"init_from": tmp_path / "theirs", "steps": 3, "model": None, "seq_len": None}
    flags_ |= dict.fromkeys(("n_layer", "n_head", "n_embd"))
    assert prepare(tmp_path / "bytes", "--input", __file__) == 0
    code, _, err = train(flags(data_dir=tmp_path / "bytes", **flags_), tmp_path)
    assert code == 2 and f"knows {theirs.name} tokens, but" in err and "holds bytes" in err
    cure = ("--input", __file__, "--tokenizer", str(tmp_path / "theirs"))
    assert prepare(tmp_path / "data", *cure) == 0
    out_dir = run(tmp_path, tmp_path / "data", **flags_)
    last = next(out_dir.glob("step_*3"))
    assert read_tokenizer(last).sha256 == theirs.sha256
    assert json.loads((last / "config.json").read_text())["eos_token_id"] == 1
    assert transformers.AutoTokenizer.from_pretrained(last).eos_token == "</s>"
