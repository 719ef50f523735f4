"""Tests ../prepare_data.py."""

import json
import os
import random
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_data
from dataloader import Shard, missing_vocab, open_folder, open_shard
from prepare_data import Split, deal


def prepare(folder: Path, *flags) -> int:
    return prepare_data.main(["--data-dir", str(folder), *map(str, flags)])


def stream(shards: list[Shard]) -> list[int]:
    return [int(token) for shard in shards for token in shard.read(0, shard.num_tokens)]


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of 40 documents of up to 2 kB, written in no order."""
    (tmp_path / "texts").mkdir()
    for n in random.Random(0).sample(range(40), 40):
        (tmp_path / "texts" / f"{n:02}.txt").write_bytes(b"line %d\n" % n * (5 * n + 1))
    return tmp_path / "texts"


def test_the_same_input_gives_the_same_bytes(texts, tmp_path):
    flags = ("--input", texts, "--shard-tokens", 5000, "--val-fraction", 0.3)
    assert [prepare(tmp_path / name, *flags) for name in ("a", "b")] == [0, 0]
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b and len(a) > 3


def test_the_manifest_says_what_the_shards_hold(texts, tmp_path):
    flags = ("--input", texts, "--shard-tokens", 1024, "--val-fraction", 0.3)
    assert prepare(tmp_path / "data", *flags) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    for split in (manifest["train"], manifest["val"]):
        tokens = []
        for shard in split["shards"]:
            content = (tmp_path / "data" / shard["name"]).read_bytes()
            ids = np.frombuffer(content[1024:], "<u2").tolist()
            tokens += ids
            found = {"tokens": len(ids), "largest_id": max(ids)}
            found |= {"bytes": len(content), "crc32": zlib.crc32(content)}
            assert shard == {"name": shard["name"], **found}
        found = {"tokens": len(tokens), "documents": tokens.count(256)}
        found |= {"bytes": len(tokens) - tokens.count(256)}
        assert split == {"shards": split["shards"], **found}


AWKWARD = [b"", b"\0", b"\xff\xfe", b"a\r\nb\r", "\N{GRINNING FACE}".encode()]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(AWKWARD) | st.binary(max_size=40)), st.integers(2, 30))
def test_the_shards_of_any_size_join_to_the_documents(documents, shard_tokens):
    with tempfile.TemporaryDirectory() as folder:
        split = Split(Path(folder), "train", shard_tokens)
        for text in documents:
            split.add(text, prepare_data.bytes_tokenizer().encode(text))
        split.write_pending()
        shards = [open_shard(Path(folder, shard["name"])) for shard in split.shards]
        assert stream(shards) == [token for text in documents for token in (256, *text)]
        assert all(shard.num_tokens == shard_tokens for shard in shards[:-1])


@pytest.mark.skipif(bool(missing_vocab()), reason="TIKTOKEN_CACHE_DIR has no GPT-2 vocabulary")
def test_gpt2s_tokens_are_tiktokens(tmp_path):
    import tiktoken

    texts = ["Hello, I'm a language model,", "<|endoftext|> is text", "na\u00efve\r\n\0\t  "]
    documents = [*(text.encode() for text in texts), b"caf\xe9 \xff\xfe", b"x\n" * 10]
    for i, text in enumerate(documents):
        (tmp_path / f"{i}.txt").write_bytes(text)
    flags = ("--input", tmp_path, "--tokenizer", "gpt2", "--val-fraction", 0)
    assert prepare(tmp_path / "data", *flags) == 0
    documents[-1:] = [b"x\n" * 9, b"x\n"]  # its last tenth is the validation text
    encode = tiktoken.get_encoding("gpt2").encode
    texts = [text.decode(errors="replace") for text in documents]
    tokens = [[50256, *encode(text, disallowed_special=())] for text in texts]
    folder = open_folder(tmp_path / "data")
    assert stream(folder.train) == sum(tokens[:-1], [])
    assert stream(folder.val) == tokens[-1]
    assert tokens[0] == [50256, 15496, 11, 314, 1101, 257, 3303, 2746, 11]


def test_without_a_network_the_message_names_the_files_to_fetch(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tiktoken")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # it remembers what other tests loaded
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert prepare(tmp_path / "data", "--input", __file__, "--tokenizer", "gpt2") == 2
    names = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    error = capsys.readouterr().err
    assert all(name in error for name in (*names, "TIKTOKEN_CACHE_DIR"))


def test_validation_is_drawn_by_document_and_by_seed():
    texts, drawn = [b"%d" % n for n in range(1000)], set()
    for seed in range(5):
        splits = list(deal(texts, 0.5, seed))
        assert [text for _, text in splits] == texts  # each once, so none in both
        names = tuple(name for name, _ in splits)
        assert names[0] == "train" and 437 < names.count("val") < 563  # 500, 4 standard deviations
        drawn.add(names)
    assert len(drawn) == 5


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        pytest.param(b"a line\n" * 20, 18 * 7, id="lines"),
        pytest.param(b"a line\n" * 15, 13 * 7, id="a line spans the cut"),
        pytest.param(b"x" * 100, 90, id="no line end"),
        pytest.param(b"A title\n" + b"x" * 992, 900, id="no line end near"),
    ],
)
def test_of_a_single_document_the_last_tenth_is_validation_from_a_line_end(text, cut):
    assert list(deal([text], 0.1, 0)) == [("train", text[:cut]), ("val", text[cut:])]


def test_a_folder_is_read_sorted_and_hidden_files_are_left_out(texts):
    (texts / ".git").mkdir()
    for name in (".hidden.txt", ".git/config"):
        (texts / name).touch()
    assert prepare_data.files_in([texts]) == [texts / f"{n:02}.txt" for n in range(40)]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = b'{"text": "a\\nb"}\n{"id": 7, "text": "\\u00e9"}\n{"text": ""}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert list(prepare_data.documents([tmp_path / "a.jsonl"])) == [b"a\nb", b"\xc3\xa9"]


GOOD_LINE = b'{"text": "%b"}\n' % (b"x" * 2000)  # a shard is on the disk before the error
BAD_LINES = b"text", b'["text"]', b'{"txt": ""}', b'{"text": 1}', b'{"text": "caf\xe9"}'


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("nowhere", b"", "nowhere does not exist"),
        ("a.jsonl", b"", "the input holds no text"),
        *(("a.jsonl", GOOD_LINE + line, "a.jsonl, line 2") for line in BAD_LINES),
    ],
    ids=["no file", "no text", "no JSON", "no object", "no field", "no string", "no UTF-8"],
)
def test_a_bad_input_is_refused_and_leaves_nothing_behind(name, content, why, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert prepare(tmp_path / "data", "--input", tmp_path / name, "--shard-tokens", 1024) == 2
    assert why in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_an_existing_folder_is_refused_and_kept(texts, capsys):
    before = {file.name: file.read_bytes() for file in texts.iterdir()}
    assert prepare(texts, "--input", texts) == 2
    assert "exists; name another, or remove it" in capsys.readouterr().err
    assert before == {file.name: file.read_bytes() for file in texts.iterdir()}


def test_the_standard_library_is_this_pythons_source():
    files = prepare_data.standard_library()
    assert {Path(json.__file__), Path(random.__file__)} <= set(files)
    assert {file.suffix for file in files} == {".py"} and files == sorted(files)
    assert not any("site-packages" in file.parts for file in files)
    assert sum(file.stat().st_size for file in files) > 5_000_000
