"""Tests ../support/corpus.py: folders of shards, manifests and fingerprints."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_POSIX, write_shard
from test_dataloader import RAW, TOKENS, llmc, npy, with_crcs

import prepare_data
from dataloader import Shard, ShardLoader, open_shard
from support import corpus
from support.corpus import TokenFolder, open_folder
from support.questions import read_examples


@pytest.mark.parametrize("content", [llmc(), npy(), RAW], ids=["llm.c", "npy", "raw"])
def test_a_layout_is_told_by_its_content(content, tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(content)
    for shard in open_folder(tmp_path).train + open_folder(tmp_path).val:
        assert np.array_equal(shard.read(0, shard.num_tokens), TOKENS)


def test_a_run_keeps_its_data_when_the_vocabulary_is_gone(tmp_path, monkeypatch):
    """tiktoken keeps it under /tmp, unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(corpus, "missing_vocab", lambda: [Path("encoder.json")])
    monkeypatch.setattr(corpus, "own_source", asked.append)
    for known in (50257, 0):
        for folder in ("data", "data/stdlib-gpt2"):
            Path(folder).mkdir(exist_ok=True)
            with pytest.raises(TypeError):  # no folder to open
                corpus.choose("", 8, known, None)
    assert asked == ["bytes", "gpt2", "bytes", "bytes"]


@pytest.mark.parametrize("make", ["mkdir", "mkfifo"])
def test_what_is_not_a_file_is_refused_and_does_not_hang(make, tmp_path):
    if not hasattr(os, make):
        pytest.skip(f"this system has no os.{make}")
    getattr(os, make)(tmp_path / "train.bin")
    with pytest.raises(ValueError, match="train.bin is not a whole.*: no file.*prepare_data.py"):
        open_folder(tmp_path)
    with pytest.raises(ValueError, match="train.bin is not a whole file of multiple.*: no file; "):
        read_examples(tmp_path / "train.bin")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["train_0.bin"], "has no val shards"),
        (["val_0.npy", "train.txt"], "has no train shards"),
        (["train_val_0.bin", "val_0.bin"], "has no train shards of its own"),
        ([], "is not a folder"),
    ],
)
def test_a_folder_without_shards_of_each_split_is_refused(names, why, tmp_path):
    for name in names:
        write_shard(tmp_path / name, TOKENS)
    with pytest.raises(FileNotFoundError, match=f"--data-dir .* {why}.*prepare_data.py"):
        open_folder(tmp_path if names else tmp_path / "nowhere")


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder that prepare_data.py wrote."""
    (tmp_path / "text").write_bytes(b"a line\n" * 1000)
    flags = ["--input", str(tmp_path / "text"), "--data-dir", str(tmp_path / "data")]
    assert prepare_data.main(flags) == 0
    return tmp_path / "data"


def test_only_what_the_manifest_names_counts(prepared):
    before = open_folder(prepared)
    (prepared / "train_000001.bin").write_bytes(b"stray")
    assert open_folder(prepared) == before


KEYS = ("tokenizer", "train", "val", "shards", "name", "tokens", "largest_id", "chunk_crc32")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"val".*', "", "manifest.json is damaged"),  # cut
        ("{", "", "manifest.json is damaged"),
        ("bytes", "\xff", "manifest.json is damaged"),
        *((f'"{key}"', '"x"', f"manifest.json is damaged .*{key}") for key in KEYS),
        ('"chunk_crc32": "', '"chunk_crc32": "x', "manifest.json (is damaged|says 6,301, with)"),
        ('"chunk_crc32": "....', '"chunk_crc32": "', "says 6,301, with [02] CRCs"),
        ("6301", "6302", "holds 6,301 tokens, manifest.json says 6,302"),
        ("train_000000", "../outside", "outside.bin is not a whole token shard: .*No such file"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(old, new, why, prepared):
    write_shard(prepared.parent / "outside.bin", np.zeros(6301))
    manifest = json.loads((prepared / "manifest.json").read_text())
    del manifest["crc32"]
    manifest = re.sub(old, new, json.dumps(manifest, indent=1), flags=re.DOTALL)
    (prepared / "manifest.json").write_text(manifest, encoding="latin-1")
    with pytest.raises((OSError, ValueError), match=why):
        open_folder(prepared)


def rewrite(folder: Path, change, sealed: bool = False) -> dict:
    """Change the content of folder's manifest, by hand or as someone who knows its CRC-32."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["crc32"]
    change(manifest)
    if sealed:
        manifest["crc32"] = corpus.content_crc32(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def test_no_flipped_bit_of_a_manifest_changes_what_it_says(prepared):
    path, before = prepared / "manifest.json", open_folder(prepared)
    content, num_same = path.read_bytes(), 0
    for bit in range(0, 8 * len(content), 3):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            num_same += open_folder(prepared) == before
        except (OSError, ValueError) as error:
            assert "manifest.json is damaged" in str(error) and "\n" not in str(error)
        else:
            assert open_folder(prepared) == before, bit
    assert num_same < 30  # in the name of the CRC


def test_a_largest_id_that_lies_lets_no_larger_token_through(prepared):
    def lie(manifest: dict):
        manifest["train"]["shards"][0]["largest_id"] = 100

    rewrite(prepared, lie, sealed=True)
    data = open_folder(prepared)
    loader = ShardLoader(data.train, 1, 16)
    why = "train_000000.bin holds token [0-9]+, manifest.json says that 100 is the largest; prepare"
    with pytest.raises(OSError, match=why):
        [loader.next_batch() for _ in range(len(loader))]
    assert prepare_data.main(["--verify", "--data-dir", str(prepared)]) == 2


HOSTILE = [
    None, True, -1, 0, 1, 255, 65535, 65536, 1.5, math.nan, math.inf, 10**19, 10**40, "", "x",
    "\0", "..", "../../etc/passwd", "\ud800", "\x1b[2J", "a" * 70_000, "AAAA", [], [0], [[]], {},
    {"a": 1}, ["x"] * 9, [None], json.loads("[" * 500 + "]" * 500),
]  # fmt: skip


def places(value, path: tuple = ()) -> list[tuple]:
    """The path of each field in value."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    inner = value.items() if isinstance(value, dict) else ()
    return [(*path, key) for key, _ in inner] + [
        place for key, item in inner for place in places(item, (*path, key))
    ]


def put(value, path: tuple, new):
    for key in path[:-1]:
        value = value[key]
    if new is KeyError:
        del value[path[-1]]
    else:
        value[path[-1]] = new


def read_all(folder: Path):
    """Open a folder as a run does and read each sequence; no token may be beyond its largest id."""
    data = open_folder(folder)
    assert re.fullmatch("(crc32|sample):[0-9a-f]{16}", data.fingerprint)
    for shards in (data.train, data.val):
        loader = ShardLoader(shards, 1, 16)
        largest = max(int(loader.next_batch()[1].max()) for _ in range(len(loader)))
        assert largest <= data.largest_id


def check_readers(folder: Path, commands: list[list[str]], capsys):
    """That each command and a run's own reader take the folder, or refuse it in one line."""
    try:
        read_all(folder)
    except (OSError, ValueError) as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
    for command in commands:
        code = prepare_data.main([*command, "--data-dir", str(folder)])
        error = capsys.readouterr().err
        assert (
            code in (0, 2)
            and error.count("\n") == (code == 2)
            and error.isprintable() <= (not code)
        )
        assert not code or error.startswith("prepare_data.py: error: ")


@pytest.fixture
def downloaded(tmp_path) -> Path:
    """A folder as --download leaves it, of shards that can be had nowhere."""
    (tmp_path / "data").mkdir()
    entries = {}
    for split, name in (("val", "fineweb_val_000000.bin"), ("train", "fineweb_train_000001.bin")):
        path = tmp_path / "data" / name
        write_shard(path, np.arange(300))
        entry = prepare_data.describe(open_shard(path)) | {"sha256": prepare_data.sha256_of(path)}
        entries[split] = {"shards": [entry], "tokens": 300}
    prepare_data.save_manifest(tmp_path / "data", {"tokenizer": {"name": "gpt2"}, **entries})
    return tmp_path / "data"


VERIFY, DOWNLOAD = ["--verify"], ["--download", "fineweb", "--shards", "1", "--mirror", "x"]


@pytest.mark.parametrize("sealed", [False, True], ids=["by hand", "with its CRC"])
@pytest.mark.parametrize("kind", ["prepared", "downloaded"])
def test_any_field_of_a_manifest_may_hold_anything(kind, sealed, request, capsys):
    folder = request.getfixturevalue(kind)
    content = (folder / "manifest.json").read_bytes()
    commands = [VERIFY, DOWNLOAD] if kind == "downloaded" else [VERIFY]
    num_cases = 0
    for place in places(json.loads(content)):
        for value in [KeyError, *HOSTILE] if place != ("crc32",) else []:
            rewrite(folder, lambda m, at=place, new=value: put(m, at, new), sealed)
            check_readers(folder, commands, capsys)
            (folder / "manifest.json").write_bytes(content)
            num_cases += 1
    assert num_cases > 500
    read_all(folder)


NO_MANIFESTS = {
    "nothing": b"", "null": b"null", "a list": b"[]", "a number": b"7", "deep": b"[" * 10**5,
    "deep objects": b'{"train":' * 10**5, "digits": b"9" * 10**5, "bytes": bytes(range(256)),
    "NaN": b"NaN", "UTF-16": "{}".encode("utf-16"), "twice": b"{}{}", "NULs": b"\0" * 4096,
}  # fmt: skip


@pytest.mark.parametrize("case", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused_in_one_line(case, downloaded, capsys):
    (downloaded / "manifest.json").write_bytes(NO_MANIFESTS[case])
    check_readers(downloaded, [VERIFY, DOWNLOAD], capsys)
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        open_folder(downloaded)


@NEEDS_POSIX
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "broken link"])
@pytest.mark.parametrize("name", ["manifest.json", "fineweb_train_000001.bin", "lock"])
def test_what_is_no_file_is_refused_and_does_not_hang(name, kind, downloaded, capsys):
    make = {"fifo": os.mkfifo, "folder": os.mkdir}
    make["device"] = lambda path: path.symlink_to("/dev/zero")
    make["broken link"] = lambda path: path.symlink_to(downloaded / "nowhere")
    (downloaded / name).unlink(missing_ok=True)
    make[kind](downloaded / name)
    check_readers(downloaded, [VERIFY, DOWNLOAD], capsys)
    assert not (downloaded / "nowhere").exists()


def folder_of(path: Path, splits: list[list[np.ndarray]], crcs: bool) -> TokenFolder:
    """The shards of both splits, in the folder path, with names that are all different."""
    path.mkdir()
    folder = [], []
    for split, shards in zip(folder, splits, strict=True):
        for tokens in shards:
            name = path / f"{path.name}_{len(os.listdir(path))}.bin"
            write_shard(name, tokens)
            split.append(with_crcs(open_shard(name)) if crcs else open_shard(name))
    return TokenFolder(*folder, "gpt2", None)


@pytest.mark.parametrize("crcs", [True, False], ids=["with CRCs", "sampled"])
def test_the_fingerprint_is_of_all_shards_and_their_order_and_not_of_names(crcs, tmp_path):
    a, b, c = (np.random.default_rng(n).integers(0, 50257, 70_001) for n in range(3))
    late = np.append(a[:-1], 0)
    middle = a.copy()
    middle[30_000:40_000] = 0
    splits = [[[a, b], [c]], [[a, b], [c]], [[b, a], [c]], [[a, b], [a]], [[late, b], [c]],
              [[middle, b], [c]], [[a], [b, c]], [[a, b, c], [c]], [[a, b[:-1]], [c]]]  # fmt: skip
    folders = [folder_of(tmp_path / f"{i}", s, crcs) for i, s in enumerate(splits)]
    seen = [folder.fingerprint for folder in folders]
    assert seen[0] == seen[1] and len(set(seen)) == len(seen) - 1
    assert all(s.startswith("crc32:" if crcs else "sample:") for s in seen)


def test_a_fingerprint_reads_a_bounded_part_of_each_shard(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "a", [[np.zeros(3_000_000)], [np.zeros(5)]], False)
    reads, read = [], Shard.read
    monkeypatch.setattr(Shard, "read", lambda *args: reads.append(args[1:]) or read(*args))
    assert folder.fingerprint
    assert reads[0] == (0, 512) and (3_000_000 - 512, 512) in reads and reads[-1] == (0, 5)
    assert len(reads) == 64 + 1
    assert folder.fingerprint  # as each save asks for it
    assert len(reads) == 64 + 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")
def test_a_manifest_leads_nowhere_else(data_dir, tmp_path):
    data = shutil.copytree(data_dir, tmp_path / "data")
    outside = shutil.copy(data / "train_000000.bin", tmp_path / "outside.bin")
    text = re.sub(r',\s*"crc32": \d+\s*}$', "}", (data / "manifest.json").read_text())  # by hand
    for name in ("../outside.bin", str(outside)):
        (data / "manifest.json").write_text(text.replace("train_000000.bin", name))
        with pytest.raises((OSError, ValueError), match=r"data.outside\.bin"):
            corpus.open_folder(data)
    (data / "manifest.json").write_text(text.replace('"tokens": 1009', '"tokens": 999999999999', 1))
    with pytest.raises(ValueError, match="999,999,999,999"):
        corpus.open_folder(data)
