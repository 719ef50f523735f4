"""Tests folders of shards in ../dataloader.py, and ../support/corpus.py."""

import json
import math
import os
import pickle
import re
import shutil
import time
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import NEEDS_POSIX, flags, prepare, train, write_shard
from data_helpers import error_of, stream
from test_dataloader import RAW, TOKENS, llmc, npy
from test_tokenizer import trained

import dataloader
import prepare_data
from config import TrainConfig
from dataloader import (
    UNFINISHED,
    DamagedShard,
    ShardError,
    ShardLoader,
    TokenFolder,
    open_folder,
)
from model import GPTConfig
from support import corpus
from support.checkpoint import load_model
from support.corpus import check_data
from support.ending import UserError
from support.files import FolderLock
from support.pretrained import Pretrained
from support.tokenizer import TOKENIZERS, load_tokenizer, read_tokenizer


@pytest.mark.parametrize("content", [llmc(), npy(), RAW], ids=["llm.c", "npy", "raw"])
def test_a_format_is_told_by_its_content(content, tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(content)
    assert stream(tmp_path, "train") == stream(tmp_path, "val") == TOKENS.tolist()


@pytest.mark.parametrize("names", [
    ["train_0.bin"], ["val_0.npy", "train.txt"], ["train_val_0.bin", "val_0.bin"], [],
])  # fmt: skip
def test_a_folder_without_shards_of_each_split_is_refused(names, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(npy() if name.endswith("npy") else llmc())
    folder = tmp_path if names else tmp_path / "nowhere"
    with pytest.raises(
        ShardError, match="^--data-dir .* (no|not a) .*: python prepare_data.py --input"
    ):
        open_folder(folder)


@NEEDS_POSIX
@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "a device"])
def test_what_is_not_a_file_is_refused_and_does_not_hang(make, tmp_path):
    path = tmp_path / "train.bin"
    path.symlink_to("/dev/zero") if make == "a device" else getattr(os, make)(path)
    with pytest.raises(ShardError, match="train.bin is not a complete.*: no file.*prepare_data.py"):
        open_folder(tmp_path)


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder that prepare_data.py wrote."""
    (tmp_path / "text").write_bytes(b"a line\n" * 1000)
    assert prepare_again(tmp_path / "data") == 0
    return tmp_path / "data"


def prepare_again(folder: Path) -> int:
    return prepare(folder, "--input", folder.parent / "text", "--shard-tokens", 2000)


def test_only_what_the_manifest_names_counts(prepared):
    before = open_folder(prepared)
    (prepared / "train_000009.bin").write_bytes(b"stray")
    assert open_folder(prepared) == before
    assert before.tokenizer == "bytes" and before.train[0].max_id == 256


def rewrite(folder: Path, path: tuple, value):
    """Change one field of folder's manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_manifest_leads_nowhere_else(prepared):
    write_shard(prepared.parent / "outside.bin", np.zeros(2000))
    for name in ("../outside.bin", str(prepared.parent / "outside.bin")):
        rewrite(prepared, ("train", "shards", 0, "name"), name)
        with pytest.raises(ShardError, match=r"data.outside\.bin is not a complete"):
            open_folder(prepared)


def test_a_manifest_that_is_about_other_shards_is_refused(prepared):
    rewrite(prepared, ("train", "shards", 0, "tokens"), 1999)
    with pytest.raises(ShardError, match="train_000000.bin is not the shard that manifest.json"):
        open_folder(prepared)


def test_a_largest_id_that_lies_lets_no_larger_token_through(prepared):
    rewrite(prepared, ("train", "shards", 0, "largest_id"), 100)
    loader = ShardLoader(open_folder(prepared).train, 1, 16)
    with pytest.raises(DamagedShard, match="train_000000.bin holds token [0-9]+, above 100"):
        [loader.next_batch() for _ in range(len(loader))]


NO_MANIFESTS = {
    "nothing": b"", "null": b"null", "a list": b"[]", "a number": b"7", "deep": b"[" * 10**5,
    "deep objects": b'{"train":' * 10**5, "bytes": bytes(range(256)), "twice": b"{}{}",
    "UTF-16": "{}".encode("utf-16"), "NULs": b"\0" * 4096,
}  # fmt: skip


@pytest.mark.parametrize("case", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused_in_one_line(case, prepared, capsys):
    (prepared / "manifest.json").write_bytes(NO_MANIFESTS[case])
    with pytest.raises(ShardError, match="manifest.json is damaged: .*; prepare it again"):
        open_folder(prepared)
    assert prepare_again(prepared) == 2
    assert "manifest.json is damaged" in error_of(capsys)


HOSTILE = [
    KeyError, None, True, -1, 0, 65536, 1.5, math.nan, math.inf, 10**40, "", "x", "\0", "..",
    "../../etc/passwd", "\ud800", "\x1b[2J", "a" * 300, [], [[]], {}, ["x"] * 9,
]  # fmt: skip
PLACES = [
    ("tokenizer",), ("tokenizer", "name"), ("train",), ("val", "shards"), ("train", "shards", 0),
    *(("train", "shards", 0, key) for key in ("name", "tokens", "largest_id", "sha256")),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_any_field_of_a_manifest_may_hold_anything(place, prepared, capsys):
    """It is taken or refused in one line, and no token beyond the largest id comes through."""
    content = (prepared / "manifest.json").read_bytes()
    for value in HOSTILE:
        (prepared / "manifest.json").write_bytes(content)
        rewrite(prepared, place, value)
        try:
            data = open_folder(prepared)
            loader = ShardLoader(data.train, 1, 16)
            assert max(int(loader.next_batch()[1].max()) for _ in range(len(loader))) <= 256
        except (OSError, ValueError, UserError) as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
        capsys.readouterr()
        if prepare_again(prepared):
            error_of(capsys)


def folder_of(path: Path, splits: list[list[np.ndarray]]) -> TokenFolder:
    """Return the shards of both splits, written into the folder path under names of its own."""
    path.mkdir(exist_ok=True)
    for split, shards in zip(("train", "val"), splits, strict=True):
        for i, tokens in enumerate(shards):
            write_shard(path / f"{path.name}_{split}_{i}.bin", tokens)
    return open_folder(path)


def test_the_fingerprint_is_of_all_shards_and_their_order_and_not_of_names(tmp_path):
    a, b, c = (np.random.default_rng(n).integers(0, 50257, 70_001) for n in range(3))
    late = np.append(a[:-1], 0)
    middle = a.copy()
    middle[30_000:40_000] = 0
    splits = [[[a, b], [c]], [[a, b], [c]], [[b, a], [c]], [[a, b], [a]], [[late, b], [c]],
              [[middle, b], [c]], [[a], [b, c]], [[a, b, c], [c]], [[a, b[:-1]], [c]]]  # fmt: skip
    seen = [folder_of(tmp_path / f"{i}", s).fingerprint for i, s in enumerate(splits)]
    assert seen[0] == seen[1] and len(set(seen)) == len(seen) - 1
    assert all(re.fullmatch("[0-9a-f]{16}", fingerprint) for fingerprint in seen)


def test_with_a_manifest_the_fingerprint_is_of_its_sha256s(prepared):
    before = open_folder(prepared).fingerprint
    os.rename(prepared / "train_000000.bin", prepared / "other.bin")
    rewrite(prepared, ("train", "shards", 0, "name"), "other.bin")
    assert open_folder(prepared).fingerprint == before
    rewrite(prepared, ("train", "shards", 0, "sha256"), "0" * 64)
    assert open_folder(prepared).fingerprint != before


def test_data_that_the_network_can_not_read_is_refused(tmp_path, prepared, monkeypatch):
    def weights(name: str) -> Pretrained:
        return Pretrained(Path("my weights"), GPTConfig(), {}, name)

    data = open_folder(prepared)
    check_data(data, 16, weights("bytes"), 257)
    check_data(data, 16, weights("unknown"), 50257)
    monkeypatch.setitem(TOKENIZERS, "bpe-0123", trained())
    cures = {"gpt2": ": .* with --tokenizer gpt2", "bpe-0123": ": .* with --tokenizer 'my weights'"}
    cures["bpe-4567"] = "; this machine lacks bpe-4567: copy vocab.json .*"
    for name, cure in cures.items():
        match = f"^my weights knows {name} tokens, but .* holds bytes{cure}$"
        with pytest.raises(UserError, match=match):
            check_data(data, 16, weights(name), 50257)
    with pytest.raises(UserError, match="holds token 256, but the network only knows 0 to 64"):
        check_data(data, 16, None, 65)
    with pytest.raises(ShardError, match="--seq-len 5000 needs"):
        check_data(data, 5000, weights("bytes"), 257)
    others = folder_of(tmp_path / "others", [[np.arange(64)], [np.arange(65)]])
    check_data(others, 16, None, 65)  # without a manifest, read to find its largest id
    with pytest.raises(UserError, match="holds token 64, but the network only knows 0 to 63"):
        check_data(others, 16, None, 64)


def test_ids_beyond_the_vocabulary_are_refused_at_the_start_without_a_manifest_too(tmp_path):
    with pytest.raises(DamagedShard, match="holds token 60000, above 50256"):
        folder_of(tmp_path / "data", [[np.arange(500)], [np.full(700, 60_000)]])


def test_the_split_is_a_word_of_the_files_name():
    names = {
        "train": "train.bin medieval_train_1.bin Train_0.npy training0.bin mytrain.bin",
        "val": "fineweb_val_000000.bin x-validation-3.bin valid.bin medieval_val.bin evalset.bin",
        "": "train_val.bin test.bin valtrain.bin",
    }
    for split, files in names.items():
        assert {dataloader.split_of(name) for name in files.split()} == {split}


def test_what_is_left_out_and_what_is_assumed_is_said(tmp_path):
    one, other = np.arange(500), np.arange(600)
    folder = folder_of(tmp_path / "data", [[one, other], [one]]).folder
    shutil.copy(folder / "data_train_1.bin", folder / "data_train_1 (copy).bin")
    write_shard(folder / "test.bin", one)
    data = open_folder(folder)
    assert [shard.num_tokens for shard in data.train + data.val] == [500, 600, 500]
    assert [note.partition(": ")[2] for note in data.notes] == [
        "data_train_1.bin, a copy of data_train_1 (copy).bin",
        "test.bin, whose name must say either train or val",
        "assumed gpt2 tokens",
    ]
    # The vocabulary beside shards says what they hold.
    for name, content in load_tokenizer("bytes").files().items():
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match="holds token 499, above 256"):
        corpus.open_tokens(folder)
    for file in folder.glob("*.bin"):
        file.unlink()
    data = folder_of(folder, [[np.arange(200)], [np.arange(257)]])
    data = corpus.open_tokens(folder)
    assert (data.tokenizer, data.vocab_size) == ("bytes", 257)
    (folder / "meta.pkl").write_bytes(b"a pickle")
    assert "meta.pkl holds no ASCII alphabet" in open_folder(folder).notes[-1]


def test_nanogpts_characters_have_as_many_rows_as_there_are_characters(tmp_path):
    folder = folder_of(tmp_path / "data", [[np.arange(64)], [np.arange(65)]]).folder
    (folder / "meta.pkl").write_bytes(b"a pickle")
    config = TrainConfig(model="nano", data_dir=str(folder), seq_len=16, warmup_steps=0)
    assert corpus.open_data(config, None)[1] == 65


def test_text_in_bytes_has_as_many_rows_as_bytes_whatever_the_model(prepared):
    for model in ("nano", "gpt2", "gpt2-xl"):
        config = TrainConfig(model=model, data_dir=str(prepared), seq_len=16, warmup_steps=0)
        assert corpus.open_data(config, None)[1] == 257


def shakespeare_char(folder: Path, text: str) -> Path:
    """nanoGPT's data by character."""
    folder.mkdir()
    chars = sorted({*text})
    ids = {char: i for i, char in enumerate(chars)}
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": ids}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    for split in ("train", "val"):
        np.array([ids[char] for char in text], np.uint16).tofile(folder / f"{split}.bin")
    return folder


def test_nanogpts_characters_are_trained_on_with_their_alphabet(tmp_path):
    """Also after their folder is gone, and in Hugging Face's tools."""
    text = "To be, or not to be:\nthat is the question.\n" * 20
    folder = shakespeare_char(tmp_path / "shakespeare_char", text)
    line = flags(data_dir=folder, out_dir="run", prompt="To be", seq_len=16, steps=4)
    code, out, err = train(line, tmp_path)
    assert code == 0, err
    assert "bits per byte" in out and "characters, by meta.pkl" in out
    after = out[out.index("sample after step 4:\n") :].split("\n", 1)[1]
    assert after.startswith("To be") and {*after.partition("\ndone")[0]} <= {*text}
    shutil.rmtree(folder)
    model, tokenizer = load_model(str(tmp_path / "run"))
    assert model.config.vocab_size == len({*text}) == tokenizer.size
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for prompt, code in (("to", 0), ("", 0), ("T@", 2)):
        line = ["run", "--prompt", prompt, "--sample-tokens=5"]
        got, out, err = train(line, tmp_path, script="sample")
        assert got == code and (code == 0 or "the alphabet of this network has no '@'" in err)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/step_000004")
    assert theirs.encode(text) == tokenizer.encode(text)


class Remover:
    def __reduce__(self):
        return os.remove, ("precious",)


WORDS = {"the": 0, "that": 1, "cat": 2}


@pytest.mark.parametrize(
    "meta", [{"stoi": {"é": 0}}, {"stoi": Remover()}, [], {"stoi": {1: 2}}, {"stoi": WORDS},
             {"stoi": {"a": 0, "b": 0}}]
)  # fmt: skip
def test_an_alphabet_that_can_not_be_read_is_none_and_runs_no_code(meta, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("precious").touch()
    folder = folder_of(tmp_path / "data", [[np.arange(64)], [np.arange(65)]]).folder
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    data = corpus.open_tokens(folder)
    assert data.tokenizer == "unknown" and "no ASCII alphabet" in data.notes[-1]
    assert Path("precious").exists()


def test_an_alphabet_without_a_newline_is_sampled(tmp_path):
    """Such as text8's. A vocabulary with merges and no end of text is a BPE, and no alphabet."""
    folder = shakespeare_char(tmp_path / "data", "abc abd " * 99)
    code, out, err = train(flags(data_dir=folder, out_dir="run", steps=3, seq_len=16), tmp_path)
    assert code == 0 and "(no sample" not in out, err
    for name, content in trained().files().items():
        config = b'{"eos_token": null}'
        content = config if name == "tokenizer_config.json" else content
        (tmp_path / name).write_bytes(content)
    assert read_tokenizer(tmp_path).name.startswith("bpe-")


def test_a_vocabulary_that_is_not_the_manifests_is_refused(prepared):
    other = {name: text for name, text in load_tokenizer("bytes").files().items()}
    vocab = json.loads(other["vocab.json"])
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    for name, content in (other | {"vocab.json": json.dumps(vocab).encode()}).items():
        (prepared / name).write_bytes(content)
    match = "holds tokens of bytes, but the vocabulary of bpe-[0-9a-f]{12}: prepare it again"
    with pytest.raises(UserError, match=match):
        corpus.open_tokens(prepared)


def test_a_shard_without_a_manifest_is_opened_a_few_times(tmp_path, monkeypatch):
    """With 64 times, a folder of 10,000 took 46 s."""
    folder_of(tmp_path / "data", [[np.arange(2000)], [np.arange(2000)]])
    opened = []

    def counted(*args, **kwargs):
        opened.append(args)
        return open(*args, **kwargs)

    monkeypatch.setattr(dataloader, "open", counted, raising=False)
    open_folder(tmp_path / "data")
    assert 2 <= len(opened) <= 6


def test_the_own_corpus_outlives_the_vocabulary(tmp_path, monkeypatch):
    """tiktoken keeps it under /tmp, unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "load_tokenizer", lambda name: None)
    Path("data").mkdir()
    folder_of(Path("data/stdlib-gpt2"), [[np.arange(64)], [np.arange(65)]])
    config = TrainConfig(seq_len=16, warmup_steps=0)
    data, _ = corpus.open_data(config, None)
    assert data.train[0].path.parent == Path("data/stdlib-gpt2")


def test_if_the_own_corpus_can_not_be_made_the_message_names_no_other_cure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus.subprocess, "run", lambda command: SimpleNamespace(returncode=6))
    folder = re.escape(str(Path("data/stdlib-bpe")))
    with pytest.raises(UserError, match=f"{folder} could not be made: fix that, or name"):
        corpus.open_data(TrainConfig(model="nano", warmup_steps=0), None)


@pytest.mark.parametrize("name", [UNFINISHED, ".lock"])
def test_who_needs_the_own_corpus_waits_for_whoever_is_making_it(tmp_path, monkeypatch, name):
    """As two first runs, started at once. Here, the first is at its beginning, or has begun."""
    monkeypatch.chdir(tmp_path)
    files = sorted(map(str, Path(__file__).parent.glob("test_*.py")))
    monkeypatch.setattr(prepare_data, "standard_library", lambda: files)
    assert prepare_data.main([]) == 0
    whole = open_folder(Path("data/stdlib-bpe"))
    Path("data/stdlib-bpe").rename("whole")
    Path("data/stdlib-bpe").mkdir()
    Path("data/stdlib-bpe", name).write_bytes(Path("whole/manifest.json").read_bytes())
    has_locked = Event()

    def make():
        lock = FolderLock(Path("data/stdlib-bpe"))
        lock.acquire()
        has_locked.set()
        time.sleep(0.5)
        shutil.copytree("whole", "data/stdlib-bpe", dirs_exist_ok=True)
        Path("data/stdlib-bpe", UNFINISHED).unlink(missing_ok=True)
        lock.release()

    Thread(target=make).start()
    has_locked.wait()

    def run(command: list) -> SimpleNamespace:
        return SimpleNamespace(returncode=prepare_data.main([]))

    monkeypatch.setattr(corpus.subprocess, "run", run)
    data, _ = corpus.open_data(TrainConfig(model="nano", warmup_steps=0), None)
    assert data.fingerprint == whole.fingerprint
