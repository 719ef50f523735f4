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

BAD_LINES = {
    "no JSON": b"text",
    "no object": b'["text"]',
    "no text": b'{"txt": ""}',
    "a number": b'{"text": 1}',
    "half a surrogate": b'{"text": "\\ud800"}',
    "no UTF-8": b'{"text": "caf\xe9"}',
}
needs_vocabulary = pytest.mark.skipif(
    bool(missing_vocab()), reason="GPT-2's vocabulary is not in TIKTOKEN_CACHE_DIR"
)


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
    for name in ("a", "b"):
        assert prepare(tmp_path / name, "--input", texts, "--shard-tokens", 5000) == 0
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b and len(a) > 3


def test_the_manifest_says_what_the_shards_hold(texts, tmp_path):
    flags = ("--shard-tokens", 1024, "--val-fraction", 0.3)
    assert prepare(tmp_path / "data", "--input", texts, *flags) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    for split in (manifest["train"], manifest["val"]):
        tokens = []
        for shard in split["shards"]:
            content = (tmp_path / "data" / shard["name"]).read_bytes()
            ids = np.frombuffer(content[1024:], "<u2").tolist()
            assert shard == {
                "name": shard["name"], "tokens": len(ids), "bytes": len(content),
                "largest_id": max(ids), "crc32": zlib.crc32(content),
            }  # fmt: skip
            tokens += ids
        assert (split["tokens"], split["documents"]) == (len(tokens), tokens.count(256))
        assert split["bytes"] == len(tokens) - tokens.count(256)
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 40


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


@needs_vocabulary
def test_gpt2s_tokens_are_tiktokens(tmp_path):
    import tiktoken

    documents = [
        "<|endoftext|> is text",
        "a\r\n\0\tb  ",
        "na\u00efve \N{GRINNING FACE}",
        "x\n" * 10,
    ]
    documents = [text.encode() for text in documents] + [b"caf\xe9 \xff\xfe", b"x\n" * 10]
    for i, text in enumerate(documents):
        (tmp_path / f"{i}.txt").write_bytes(text)
    flags = ("--tokenizer", "gpt2", "--val-fraction", 0)
    assert prepare(tmp_path / "data", "--input", tmp_path, *flags) == 0
    documents[-1:] = [b"x\n" * 9, b"x\n"]  # its last tenth is the validation text
    oracle, folder = tiktoken.get_encoding("gpt2"), open_folder(tmp_path / "data")
    texts = [text.decode(errors="replace") for text in documents]
    tokens = [[50256, *oracle.encode(text, disallowed_special=())] for text in texts]
    assert stream(folder.train) == sum(tokens[:-1], [])
    assert stream(folder.val) == tokens[-1]


@needs_vocabulary
def test_gpt2s_tokens_are_the_known_ones():
    tokens = prepare_data.gpt2_tokenizer().encode(b"Hello, I'm a language model,")
    assert tokens.tolist() == [50256, 15496, 11, 314, 1101, 257, 3303, 2746, 11]


def test_without_a_network_the_message_says_where_the_vocabulary_goes(
    texts, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("tiktoken")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # what other tests have loaded
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("https_proxy", "no_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    assert prepare(tmp_path / "data", "--input", texts, "--tokenizer", "gpt2") == 2
    error = capsys.readouterr().err
    for name in ("6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "TIKTOKEN_CACHE_DIR",
                 "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"):  # fmt: skip
        assert name in error
    assert os.listdir(tmp_path) == ["texts"]


def test_validation_is_drawn_by_document_and_by_seed():
    texts = [b"%d" % n for n in range(1000)]
    val = []
    for seed in (1, 2, 1):
        splits = list(deal(texts, 0.1, seed))
        assert [text for _, text in splits] == texts  # each once, so none in both
        val.append([text for name, text in splits if name == "val"])
        assert 60 < len(val[-1]) < 140  # 100 and 4 standard deviations
    assert val[0] == val[2] != val[1]


def test_there_is_always_a_document_for_each_split():
    for seed in range(20):
        names = [name for name, _ in deal([b"first", b"second"], 0.5, seed)]
        assert names in (["train", "val"], ["train", "train", "val"])


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        pytest.param(b"a line\n" * 20, 18 * 7, id="lines"),
        pytest.param(b"a line\n" * 15, 13 * 7, id="lines that ten does not divide"),
        pytest.param(b"x" * 100, 90, id="no line end"),
        pytest.param(b"A title\n" + b"x" * 992, 900, id="no line end near"),
        pytest.param(b"x", 0, id="one byte"),
    ],
)
def test_a_single_documents_last_tenth_is_validation_from_a_line_end(text, cut):
    assert list(deal([text], 0.1, 0)) == [("train", text[:cut]), ("val", text[cut:])]


def test_a_folder_is_read_sorted_and_hidden_files_are_left_out(texts):
    (texts / ".git").mkdir()
    for name in (".hidden.txt", ".git/config"):
        (texts / name).write_text("hidden")
    assert prepare_data.files_in([texts]) == [texts / f"{n:02}.txt" for n in range(40)]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = b'{"text": "a\\nb"}\n{"id": 7, "text": "\\u00e9"}\n{"text": ""}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert list(prepare_data.documents([tmp_path / "a.jsonl"])) == [b"a\nb", b"\xc3\xa9"]


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_refused_by_file_and_number_and_leaves_nothing(line, tmp_path, capsys):
    good = b'{"text": "%b"}\n' % (b"x" * 2000)  # a shard is on the disk when the bad line comes
    (tmp_path / "a.jsonl").write_bytes(good + line + b"\n")
    flags = ("--input", tmp_path / "a.jsonl", "--shard-tokens", 1024)
    assert prepare(tmp_path / "data", *flags) == 2
    assert "a.jsonl, line 2" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "why"), [("nowhere", "nowhere does not exist"), ("empty", "the input holds no text")]
)
def test_an_input_without_text_is_refused_and_leaves_nothing(name, why, tmp_path, capsys):
    (tmp_path / "empty").touch()
    assert prepare(tmp_path / "data", "--input", tmp_path / name) == 2
    assert why in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["empty"]


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
