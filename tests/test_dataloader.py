"""Tests ../dataloader.py."""

import io
import json
import math
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_shard

import dataloader
import prepare_data
from dataloader import Shard, ShardLoader, open_shard
from support import corpus, files
from support.corpus import TokenFolder, open_folder
from support.questions import read_examples

TOKENS = np.arange(1000, dtype="<u2")
RAW = TOKENS.tobytes()
NEEDS_POSIX = pytest.mark.skipif(os.name != "posix", reason="needs links, pipes and fork")


def llmc(num_tokens=1000, magic=20240520, version=1, tokens=RAW) -> bytes:
    return struct.pack("<3i", magic, version, num_tokens).ljust(1024, b"\0") + tokens


def npy(array: np.ndarray = TOKENS) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_written_shard_reads_back_and_is_llmcs_byte_for_byte(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 65536, 1009)
    write_shard(tmp_path / "a.bin", tokens)
    assert (tmp_path / "a.bin").read_bytes() == llmc(1009, tokens=struct.pack("<1009H", *tokens))
    shard = open_shard(tmp_path / "a.bin")
    assert np.array_equal(shard.read(0, shard.num_tokens), tokens)
    assert np.array_equal(shard.read(17, 5), tokens[17:22])


@pytest.mark.parametrize("content", [llmc(), npy(), RAW], ids=["llm.c", "npy", "raw"])
def test_a_layout_is_told_by_its_content(content, tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(content)
    for shard in open_folder(tmp_path).train + open_folder(tmp_path).val:
        assert np.array_equal(shard.read(0, shard.num_tokens), TOKENS)


REFUSED = {  # the first word is the file's name
    "a.bin, empty": (b"", "starts with 0, 0 instead of 20240520, 1"),
    "a.bin, header only": (llmc(0, tokens=b""), "holds 0 tokens, its header says 0"),
    "a.bin, cut by a byte": (llmc()[:-1], "holds 999.5 tokens, its header says 1,000"),
    "a.bin, cut in half": (llmc()[:1512], "holds 244 tokens, its header says 1,000"),
    "a.bin, too long": (llmc() + b"ab", "holds 1,001 tokens, its header says 1,000"),
    "a.bin, foreign": (llmc(magic=20240521), "starts with 20240521, 1 instead"),
    "a.bin, of Llama 3": (llmc(magic=20240801, version=7), "starts with 20240801, 7 instead"),
    "a.bin, other version": (llmc(version=2), "starts with 20240520, 2 instead"),
    "a.npy, int32": (npy(TOKENS.astype("<i4")), "holds int32"),
    "a.npy, float64": (npy(TOKENS.astype("<f8")), "holds float64"),
    "a.npy, big-endian": (npy(TOKENS.astype(">u2")), "holds >u2"),
    "a.npy, in rows": (npy(TOKENS.reshape(2, 500)), "of shape (2, 500)"),
    "a.npy, objects": (npy(TOKENS.astype(object)), "Python objects"),
    "a.npy, cut": (npy()[:-1], "mmap length is greater than file size"),
    "a.npy, header without end": (npy().replace(b"}", b" "), ""),
    "a.npy, header without sense": (npy().replace(b"<u2", b"<02"), ""),
    "train.bin, odd size": (RAW[:-1], "holds 1,999 bytes, not a number of 2-byte tokens"),
    "train.bin, text": (b"To be, or not to be\n" * 50, "holds text"),
    "train.bin, int32": (TOKENS.astype("<i4").tobytes(), "holds 32-bit numbers"),
    "train.bin, id too large": ((TOKENS + 49258).tobytes(), "holds 50257, no token of GPT-2's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_a_whole_shard_is_refused(case, tmp_path):
    name, (content, why) = case.split(",")[0], REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not a whole token shard: .*{re.escape(why)}"):
        open_shard(tmp_path / name)


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


def test_hostile_headers_of_shards_are_refused_or_whole(tmp_path):
    words = [-(2**31), -1, 0, 1, 3, 2**15, 20240520, 20240522, 2**31 - 1]
    for at, word in ((at, word) for at in range(4) for word in words):
        content = bytearray(llmc())
        content[4 * at : 4 * at + 4] = struct.pack("<i", word)
        check_shard(tmp_path / "a.bin", bytes(content))
    whole = npy()
    for bit in range(8 * (len(whole) - len(RAW))):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        check_shard(tmp_path / "a.npy", bytes(content))
    for shape in ("(-1,)", "()", "(2**62,)", f"({2**62},)", f"({10**40},)", "(1000L,)", "(" * 99):
        check_shard(tmp_path / "a.npy", whole.replace(b"(1000,)", shape.encode()))


def check_shard(path: Path, content: bytes):
    path.write_bytes(content)
    try:
        shard = open_shard(path)
    except ValueError as error:
        assert str(error).startswith(f"{path} is not a whole token shard: ")
    else:
        assert np.array_equal(shard.read(0, shard.num_tokens), TOKENS)


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
    old = [folder.old_fingerprint() for folder in folders]
    assert old[3] == old[4] == old[0] != old[2] and not any(":" in s for s in old)


def test_the_old_fingerprint_is_the_one_in_checkpoints_of_before(tmp_path):
    folder = folder_of(tmp_path / "a", [[np.arange(700), np.arange(9)], [np.arange(20)]], False)
    assert folder.old_fingerprint() == "e3924e6702d1f737"


def test_a_fingerprint_reads_a_bounded_part_of_each_shard(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "a", [[np.zeros(3_000_000)], [np.zeros(5)]], False)
    reads, read = [], Shard.read
    monkeypatch.setattr(Shard, "read", lambda *args: reads.append(args[1:]) or read(*args))
    assert folder.fingerprint
    assert reads[0] == (0, 512) and (3_000_000 - 512, 512) in reads and reads[-1] == (0, 5)
    assert len(reads) == 64 + 1
    assert folder.fingerprint  # as each save asks for it
    assert len(reads) == 64 + 1


@NEEDS_POSIX
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_kept(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="lock is a link or no file: remove it"):
        files.locked(tmp_path / "data")
    (tmp_path / "data" / "a.tmp").symlink_to(tmp_path / "mine")
    with files.whole_file(tmp_path / "data" / "a") as f:
        f.write(b"new")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "data" / "a").read_bytes() == b"new"


def test_the_largest_id_is_numpys(tmp_path):
    tokens = np.zeros((1 << 20) + 5, np.uint16)  # more than is read at a time
    tokens[[0, -1]] = 50000, 50001
    write_shard(tmp_path / "a.bin", tokens)
    assert open_shard(tmp_path / "a.bin").largest_id() == tokens.max()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_is_written_whole_or_not_at_all(error, tmp_path):
    with files.whole_file(tmp_path / "a") as f:
        f.write(b"old")
    with pytest.raises(error), files.whole_file(tmp_path / "a") as f:
        f.write(b"new")
        raise error
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("a", b"old")]


def test_missing_vocab_names_the_files_that_tiktoken_looks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    names = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    assert files.missing_vocab() == [tmp_path / name for name in names]
    for name in names:
        (tmp_path / name).touch()
    assert files.missing_vocab() == []


# --------------------------------------------------------------------------------------------------
# Multiple-choice questions

QUESTIONS = [  # context, choices, label
    ([318, 50256, 0], [[7], [8, 9], [10, 11, 12], [13]], 3),
    ([1], [[65535], [2, 65535, 2]], 0),
    (list(range(100)), [[5]] * 25 + [[6, 7]], 25),
]


def packed(label: int, texts: list[list[int]], index=0, size=None, start=65535, num=None) -> bytes:
    """An example as llm.c's documentation has it; texts: its context and its choices."""
    body = struct.pack("<2H", label, len(texts) - 1 if num is None else num)
    body += b"".join(struct.pack(f"<{1 + len(text)}H", len(text), *text) for text in texts)
    return struct.pack("<3H", start, len(body) + 6 if size is None else size, index) + body


def eval_file(examples: list[bytes], magic=20240522, version=1, count=None) -> bytes:
    count = len(examples) if count is None else count
    header = struct.pack("<4i", magic, version, count, max(map(len, examples), default=0))
    return header.ljust(1024, b"\0") + b"".join(examples)


def eval_file_of(questions: list[tuple]) -> bytes:
    return eval_file([packed(q[2], [q[0], *q[1]], i) for i, q in enumerate(questions)])


def read_back(path: Path) -> list[tuple]:
    """The questions that read_examples finds, as lists of numbers."""
    examples = read_examples(path)
    assert all(t.dtype == np.uint16 for e in examples for t in (e.context, *e.choices))
    return [(e.context.tolist(), [c.tolist() for c in e.choices], e.label) for e in examples]


def test_questions_of_any_number_of_choices_are_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(eval_file_of(QUESTIONS))
    assert read_back(tmp_path / "a.bin") == QUESTIONS


GOOD, TEXTS = packed(1, [[1], [2], [3]]), [[1], [2], [3]]
NO_QUESTIONS = {
    "empty": (b"", "starts with 0, 0 instead of 20240522, 1"),
    "a shard": (llmc(), "starts with 20240520, 1 instead"),
    "other version": (eval_file([GOOD], version=2), "starts with 20240522, 2 instead"),
    "header only": (eval_file([]), "holds 0 examples, its header says 0"),
    "one too few": (eval_file([GOOD], count=2), "holds 1 examples, its header says 2"),
    "one too many": (eval_file([GOOD], count=0), "holds 1 examples, its header says 0"),
    "less than none": (eval_file([GOOD], count=-1), "holds 1 examples, its header says -1"),
    "a byte more": (eval_file([GOOD]) + b"a", "buffer size must be a multiple"),
    "a word more": (eval_file([GOOD]) + b"ab", "example 1 starts as 25185, 0, not 65535, 1"),
    "no start": (eval_file([packed(1, TEXTS, start=7)]), "example 0 starts as 7, 0, not 65535, 0"),
    "same index": (eval_file([GOOD, GOOD]), "example 1 starts as 65535, 0, not 65535, 1"),
    "no bytes": (eval_file([packed(1, TEXTS, size=0)]), "example 0 does not fit into its 0 bytes"),
    "odd bytes": (eval_file([packed(1, TEXTS, size=23)]), "does not fit into its 23 bytes"),
    "too few bytes": (eval_file([packed(1, TEXTS, size=20)]), "does not fit into its 20 bytes"),
    "too many bytes": (eval_file([packed(1, TEXTS, size=24)]), "does not fit into its 24 bytes"),
    "fewer choices": (eval_file([packed(1, TEXTS, num=3)]), "does not fit into its 22 bytes"),
    "more choices": (eval_file([packed(0, TEXTS, num=1)]), "does not fit into its 22 bytes"),
    "no context": (eval_file([packed(1, [[], [2], [3]])]), "has an empty context or choice"),
    "empty choice": (eval_file([packed(1, [[1], [2], []])]), "has an empty context or choice"),
    "label": (eval_file([packed(2, TEXTS)]), "example 0 has label 2 of 2 choices"),
    "one choice": (eval_file([packed(0, TEXTS[:2])]), "example 0 has label 0 of 1 choices"),
}


@pytest.mark.parametrize("case", NO_QUESTIONS)
def test_a_file_that_is_not_whole_questions_is_refused_in_one_line(case, tmp_path):
    content, why = NO_QUESTIONS[case]
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"^.*a.bin is not a whole file .*: .*{re.escape(why)}.*$"):
        read_examples(tmp_path / "a.bin")


def test_questions_cut_anywhere_are_refused(tmp_path):
    content = eval_file_of(QUESTIONS)
    for size in [*range(0, 1024, 10), *range(1024, len(content))]:
        (tmp_path / "a.bin").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"^.*a.bin is not a whole file of .*$"):
            read_examples(tmp_path / "a.bin")


def test_questions_with_flipped_words_are_refused_or_are_what_the_file_says(tmp_path):
    words, rng = np.frombuffer(eval_file_of(QUESTIONS[:2] * 3), "<u2"), np.random.default_rng(0)
    num_read = 0
    for _ in range(600):
        damaged = words.copy()
        at = rng.choice([*range(8), *range(512, len(words))], rng.integers(1, 4))
        damaged[at] = rng.choice(
            [0, 1, 2, 3, 5, 18, 30, 65534, 65535, rng.integers(65536)], at.size
        )
        (tmp_path / "a.bin").write_bytes(damaged.tobytes())
        try:
            found = eval_file_of(read_back(tmp_path / "a.bin"))
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path}") and "\n" not in str(error)
            continue
        num_read += 1
        assert found[:12] + found[1024:] == damaged[:6].tobytes() + damaged[512:].tobytes()
    assert 60 < num_read < 540


T = 4
FIRSTS = [*range(0, 100, T), *range(104, 120, T), *range(121, 181, T)]  # of the 44 sequences
BATCHES = [(B, ranks) for B in (1, 2, 3, 8) for ranks in (1, 2, 3, 4)]


@pytest.fixture
def shards(tmp_path) -> list[Shard]:
    """Each token is its own index in the stream; the second shard is too short for a sequence."""
    for i, (start, end) in enumerate([(0, 101), (101, 104), (104, 121), (121, 185)]):
        write_shard(tmp_path / f"train_{i}.bin", np.arange(start, end))
    return [open_shard(tmp_path / f"train_{i}.bin") for i in range(4)]


def dealt(shards: list[Shard], B: int, ranks: int, seed: int | None, start=0, count=150):
    """The first tokens of count sequences or a few more, in the order that the ranks get them."""
    loaders = [ShardLoader(shards, B, T, rank, ranks, seed) for rank in range(ranks)]
    for loader in loaders:
        loader.position = start
    stream = []
    while len(stream) < count:
        stream += torch.cat([loader.next_batch()[0][:, 0] for loader in loaders]).tolist()
    assert {loader.position for loader in loaders} == {start + len(stream)}
    return stream


def test_sequences_and_targets_are_read_right_across_shard_ends(shards):
    inputs, targets = ShardLoader(shards, 44, T, seed=1).next_batch()
    assert sorted(inputs[:, 0].tolist()) == FIRSTS
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(T))
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("seed", [None, 1])
def test_batch_size_and_ranks_do_not_change_the_order(seed, shards):
    order = dealt(shards, 1, 1, seed)
    assert all(dealt(shards, B, ranks, seed)[:150] == order for B, ranks in BATCHES)


def test_each_epoch_deals_each_sequence_once_in_a_new_order(shards):
    for B, ranks in BATCHES:
        stream = dealt(shards, B, ranks, seed=0)
        epochs = [stream[i : i + 44] for i in (0, 44, 88)]
        assert all(sorted(epoch) == FIRSTS for epoch in epochs)
        assert len({tuple(epoch) for epoch in [FIRSTS, *epochs]}) == 4
        assert dealt(shards, B, ranks, seed=None)[:132] == FIRSTS * 3  # in the disk's order


@pytest.mark.parametrize("seed", [None, 1])
def test_a_position_continues_with_other_batches_and_ranks(seed, shards):
    order = dealt(shards, 1, 1, seed)
    for before, after in zip(BATCHES, reversed(BATCHES), strict=True):
        begun = dealt(shards, *before, seed, count=60)
        ended = dealt(shards, *after, seed, start=len(begun), count=90)
        assert (begun + ended)[:150] == order


def test_reading_ahead_changes_nothing_and_hides_no_error(shards, monkeypatch):
    order, reads, read = dealt(shards, 2, 1, seed=1), [], Shard.read
    monkeypatch.setattr(Shard, "read", lambda *args: reads.append(args) or read(*args))
    loader = ShardLoader(shards, 2, T, seed=1)
    loader.read_ahead()
    assert loader.position == 0 and len(reads) == 2
    assert [loader.next_batch()[0][:, 0].tolist() for _ in range(3)] == [
        order[0:2], order[2:4], order[4:6],
    ]  # fmt: skip
    assert len(reads) == 6, "what was read ahead is read once"
    loader.read_ahead()
    loader.position = 2  # as a resume sets it
    assert loader.next_batch()[0][:, 0].tolist() == order[2:4]
    monkeypatch.setattr(Shard, "read", lambda *_: (_ for _ in ()).throw(OSError("a bad disk")))
    loader.read_ahead()
    with pytest.raises(OSError, match="a bad disk"):
        loader.next_batch()


def test_a_shard_cut_while_in_use_is_an_error_that_names_it(shards):
    os.truncate(shards[2].path, shards[2].path.stat().st_size - 1)
    with pytest.raises(OSError, match="train_2.bin is damaged: its tokens 12 to 17 are not whole"):
        ShardLoader(shards, 44, T).next_batch()


def with_crcs(shard: Shard) -> Shard:
    return corpus.open_entry(shard.path.parent, prepare_data.describe(shard))


def test_crcs_change_no_token_at_any_place(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 3 * dataloader.CHUNK + 7).astype("<u2")
    write_shard(tmp_path / "a.bin", tokens)
    shard = with_crcs(open_shard(tmp_path / "a.bin"))
    assert len(shard.crcs) == 4 * 4
    for start in (
        0,
        1,
        dataloader.CHUNK - 1,
        dataloader.CHUNK,
        3 * dataloader.CHUNK,
        len(tokens) - 9,
    ):
        for count in (1, 9, dataloader.CHUNK, len(tokens)):
            wanted = tokens[start : start + count]
            assert np.array_equal(shard.read(start, len(wanted)), wanted)


def test_a_shard_that_is_written_over_while_in_use_is_an_error_that_names_it(shards):
    checked = [with_crcs(shard) for shard in shards]
    loader = ShardLoader(checked, 44, T)
    loader.next_batch()
    write_shard(shards[3].path, np.arange(64))  # as long as it was
    with pytest.raises(OSError, match="train_3.bin is damaged: its tokens 0 to 64 are not whole"):
        loader.next_batch()


def test_a_shard_of_one_token_is_refused_with_a_cure_that_works(tmp_path):
    write_shard(tmp_path / "a.bin", np.zeros(1))
    with pytest.raises(ValueError, match="tokens, the longest has 1: prepare more text"):
        ShardLoader([open_shard(tmp_path / "a.bin")], B=1, T=8)


def test_a_sequence_longer_than_every_shard_is_refused(shards):
    assert len(ShardLoader(shards, B=1, T=100)) == 1
    why = "--seq-len 101 needs shards of 102 tokens, the longest has 101: try --seq-len 100"
    with pytest.raises(ValueError, match=why):
        ShardLoader(shards, B=1, T=101)


def shuffle(length: int, seed=1, epoch=0, count: int | None = None) -> list[int]:
    return [dataloader.shuffled(n, length, seed, epoch) for n in range(count or length)]


def test_shuffled_is_a_permutation():
    for length in (*range(1, 301), 10_007):
        assert sorted(shuffle(length)) == list(range(length))


@pytest.mark.slow
def test_shuffled_is_a_permutation_of_every_length_to_10_000():
    for length in range(301, 10_001):
        if length < 2000 or length % 17 == 0:  # the others differ in where the walk ends alone
            assert sorted(shuffle(length, seed=length)) == list(range(length))


def test_of_100_million_each_is_dealt_once_and_no_neighbours_stay_together():
    length, starts = 100_000_000, range(0, 100_000_000, 1_000_003)
    seen, orders = set(), []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        order = [
            dataloader.shuffled(n, length, seed, epoch)
            for start in starts
            for n in (start, start + 1)
        ]
        assert len(set(order)) == len(order) and 0 <= min(order) and max(order) < length
        steps = np.abs(np.diff(np.array(order).reshape(-1, 2)))
        assert steps.min() > 1000 and abs(np.mean(steps) / length - 1 / 3) < 0.1  # 4 deviations
        correlation = np.corrcoef(order, range(len(order)))[0, 1]
        assert abs(correlation) < 0.3  # 4 deviations of 200 independent pairs
        seen |= set(order)
        orders.append(order)
    assert len(seen) > 3 * len(orders[0]) - 3  # other seeds and epochs go other ways
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(orders[a], orders[b])[0, 1]) < 0.3


def test_shuffled_of_long_ranges_stays_inside_and_spreads():
    for length in (2**16 + 1, 10**9 + 7, 2**40):  # too long to try all
        some = shuffle(length, count=2000)
        assert len(set(some)) == 2000 and min(some) >= 0 and max(some) < length
        assert sum(some) / 2000 == pytest.approx(length / 2, rel=0.07)  # 5 standard deviations


def test_shuffled_differs_by_seed_and_epoch_and_never_by_version():
    orders = {tuple(shuffle(99, seed, epoch)) for seed in range(9) for epoch in range(9)}
    assert len(orders) == 81
    assert shuffle(8, seed=1337) == [6, 4, 0, 3, 7, 2, 1, 5]
