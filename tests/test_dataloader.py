"""Tests ../dataloader.py."""

import hashlib
import io
import json
import math
import os
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_POSIX, write_shard

import dataloader
from dataloader import Shard, ShardError, ShardLoader, epoch_offset, open_folder, open_shard

TOKENS = np.arange(1000, dtype="<u2")
RAW = TOKENS.tobytes()


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


REFUSED = {  # the first word is the file's name
    "a.bin, empty": (b"", "[], not [20240520, 1]"),
    "a.bin, header only": (llmc(0, tokens=b""), "0 tokens, and its header says 0"),
    "a.bin, cut by a byte": (llmc()[:-1], "999.5 tokens, and its header says 1,000"),
    "a.bin, cut in half": (llmc()[:1512], "244 tokens, and its header says 1,000"),
    "a.bin, too long": (llmc() + b"ab", "1,001 tokens, and its header says 1,000"),
    "a.bin, foreign": (llmc(magic=20240521), "[20240521, 1], not"),
    "a.bin, of Llama 3": (llmc(magic=20240801, version=7), "[20240801, 7], not"),
    "a.bin, other version": (llmc(version=2), "[20240520, 2], not"),
    "a.npy, empty": (b"", ""),
    "a.npy, int32": (npy(TOKENS.astype("<i4")), "int32"),
    "a.npy, float64": (npy(TOKENS.astype("<f8")), "float64"),
    "a.npy, big-endian": (npy(TOKENS.astype(">u2")), ">u2"),
    "a.npy, in rows": (npy(TOKENS.reshape(2, 500)), "(2, 500)"),
    "a.npy, a pickle": (npy(TOKENS.astype(object)), ""),
    "a.npy, cut": (npy()[:-1], ""),
    "a.npy, too long": (npy() + b"ab", "1,001 tokens"),
    "a.npy, header without end": (npy().replace(b"}", b" "), ""),
    "a.npy, header without sense": (npy().replace(b"<u2", b"<02"), ""),
    "train.bin, empty": (b"", "0 tokens"),
    "train.bin, odd size": (RAW[:-1], "999.5 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_a_whole_shard_is_refused(case, tmp_path):
    name, (content, why) = case.split(",")[0], REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardError, match=f"{name} .*{re.escape(why)}"):
        open_shard(tmp_path / name)


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
    except ShardError as error:
        assert str(error).startswith(f"{path} ")
    else:
        assert np.array_equal(shard.read(0, shard.num_tokens), TOKENS)


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
        stream += [n for loader in loaders for n in loader.next_batch()[0][:, 0].tolist()]
    assert {loader.position for loader in loaders} == {start + len(stream)}
    return stream


def test_sequences_and_targets_are_read_right_across_shard_ends(shards):
    inputs, targets = ShardLoader(shards, 44, T, seed=1).next_batch()
    assert sorted(inputs[:, 0].tolist()) == FIRSTS
    assert inputs.dtype == targets.dtype == np.int64  # torch's embeddings and loss take no uint16
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(T))
    assert np.array_equal(targets, inputs + 1)


@pytest.mark.parametrize("seed", [None, 1])
def test_batch_size_and_ranks_do_not_change_the_order(seed, shards):
    order = dealt(shards, 1, 1, seed)
    assert all(dealt(shards, B, ranks, seed)[:150] == order for B, ranks in BATCHES)


def starts_of(sizes: list[int], T: int, offsets: list[int]) -> list[int]:
    """Return where each sequence of an epoch must begin, as the design says, with tokens numbered
    through all shards."""
    starts, before = [], 0
    for size, offset in zip(sizes, offsets, strict=True):
        for i in range((size - 1) // T):
            starts.append(before + min(offset + i * T, size - T - 1))
        before += size
    return starts


@pytest.mark.parametrize("sizes", [[101, 3, 17, 64], [33], [5, 6, 7, 8, 9], [4099, 12]])
@pytest.mark.parametrize("seed", [None, 0, 1337])
def test_three_epochs_deal_out_the_list_that_the_design_says(sizes, seed, tmp_path):
    """For 1 to 3 ranks, with a resume on other ranks in the middle of the second epoch."""
    ends = np.cumsum(sizes)
    for i, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        write_shard(tmp_path / f"{i}.bin", np.arange(end - size, end))
    shards = [open_shard(tmp_path / f"{i}.bin") for i in range(len(sizes))]
    length = len(ShardLoader(shards, 1, T))
    expected = []
    for epoch in range(3):
        offsets = [0] * len(sizes)
        if seed is not None and epoch:
            offsets = [epoch_offset(seed, epoch, i, T) for i in range(len(sizes))]
            assert all(0 <= offset < T for offset in offsets)
        expected.append(starts_of(sizes, T, offsets))
    for ranks in (1, 2, 3):
        order = dealt(shards, 1, ranks, seed, count=3 * length)[: 3 * length]
        epochs = [order[i * length : (i + 1) * length] for i in range(3)]
        if seed is None:
            assert epochs == [starts_of(sizes, T, [0] * len(sizes))] * 3  # the disk's order
        else:
            assert [sorted(epoch) for epoch in epochs] == [sorted(starts) for starts in expected]
        begun = dealt(shards, 2, ranks, seed, count=length + length // 2)
        ended = dealt(shards, 1, 1 + ranks % 3, seed, start=len(begun), count=3 * length)
        assert (begun + ended)[: 3 * length] == order
    # Of each shard only what lies before the offset, or behind the last sequence, is not read.
    for starts in expected[:1]:
        read = {start + i for start in starts for i in range(T + 1)}
        missing = set(range(sum(sizes))) - read
        assert len(missing) == sum((n - 1) % T if n > T else n for n in sizes)


def test_a_new_epoch_is_cut_at_new_places_and_in_a_new_order():
    offsets = {epoch_offset(seed, epoch, shard, 1024)
               for seed in range(4) for epoch in range(1, 5) for shard in range(4)}  # fmt: skip
    assert len(offsets) > 58 and epoch_offset(7, 0, 3, 1024) == 0
    assert min(offsets) < 100 and max(offsets) > 924


def test_reading_ahead_changes_nothing(shards, monkeypatch):
    order, reads, read = dealt(shards, 2, 1, seed=1), [], Shard.read
    monkeypatch.setattr(Shard, "read", lambda *args: reads.append(args) or read(*args))
    loader = ShardLoader(shards, 2, T, seed=1)
    loader.prefetch()
    assert loader.position == 0 and len(reads) == 2
    assert [loader.next_batch()[0][:, 0].tolist() for _ in range(3)] == [
        order[0:2], order[2:4], order[4:6],
    ]  # fmt: skip
    assert len(reads) == 6, "what was read ahead is read once"
    loader.prefetch()
    loader.position = 2  # as a resume sets it
    assert loader.next_batch()[0][:, 0].tolist() == order[2:4]


def test_a_shard_cut_while_in_use_is_an_error_that_names_it(shards):
    os.truncate(shards[2].path, shards[2].path.stat().st_size - 1)
    with pytest.raises(ShardError, match="train_2.bin ends before token 17"):
        ShardLoader(shards, 44, T).next_batch()


def test_an_id_beyond_the_vocabulary_is_an_error_that_names_it(shards):
    limited = [replace(shard, max_id=150) for shard in shards]
    loader = ShardLoader(limited, 1, T)
    with pytest.raises(ShardError, match="train_3.bin holds token 15[1-5], above 150: prepare"):
        [loader.next_batch() for _ in range(44)]


def test_a_shard_that_can_not_be_read_is_an_error_that_names_it(shards):
    shards[0].path.unlink()
    with pytest.raises(OSError, match="No such file.*train_0.bin"):
        ShardLoader(shards, 1, T).next_batch()


def test_a_sequence_longer_than_every_shard_is_refused_with_both_numbers(shards):
    assert len(ShardLoader(shards, B=1, T=100)) == 1
    with pytest.raises(ShardError, match="--seq-len 101 needs .* 102 tokens, .* has 101"):
        ShardLoader(shards, B=1, T=101)
    short = replace(shards[0], num_tokens=1)
    with pytest.raises(ShardError, match="--seq-len 1 needs .* 2 tokens, .* has 1"):
        ShardLoader([short], B=1, T=1)


def shuffle(length: int, seed=1, epoch=0, count: int | None = None) -> list[int]:
    return [dataloader.permuted(n, length, seed, epoch) for n in range(count or length)]


def test_shuffled_is_a_permutation():
    for length in (*range(1, 301), 10_007):
        assert sorted(shuffle(length)) == list(range(length))


def test_of_100_million_each_is_dealt_once_and_no_neighbours_stay_together():
    length, starts = 100_000_000, range(0, 100_000_000, 1_000_003)
    seen, orders = set(), []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        order = [
            dataloader.permuted(n, length, seed, epoch)
            for start in starts
            for n in (start, start + 1)
        ]
        assert len(set(order)) == len(order) and min(order) >= 0 and max(order) < length
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


# ---- Folders of shards ---------------------------------------------------------------------------


def stream(folder: Path, split: str) -> list[int]:
    shards = getattr(open_folder(folder), split)
    return [token for shard in shards for token in shard.read(0, shard.num_tokens).tolist()]


@pytest.mark.parametrize(
    ("content", "suffix"),
    [(llmc(), "bin"), (npy(), "npy"), (RAW, "bin")],
    ids=["llmc", "npy", "raw"],
)
def test_each_format_is_read(content, suffix, tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.{suffix}").write_bytes(content)
    assert stream(tmp_path, "train") == stream(tmp_path, "val") == TOKENS.tolist()
    data = open_folder(tmp_path)
    assert (data.tokenizer, data.vocab_size, data.train[0].max_id) == ("gpt2", 50257, 50256)


@pytest.mark.parametrize("names", [
    None, [], ["train_0.bin"], ["val_0.npy", "train.txt"], ["test.bin", "val_0.bin"],
])  # fmt: skip
def test_a_folder_without_shards_of_each_split_is_refused(names, tmp_path):
    for name in names or []:
        (tmp_path / name).write_bytes(npy() if name.endswith("npy") else llmc())
    folder = tmp_path / "nowhere" if names is None else tmp_path
    with pytest.raises(ShardError, match="--data-dir .* prepare_data.py"):
        open_folder(folder)


def test_names_that_say_no_split_are_ignored(tmp_path):
    for name in ("medieval_train_1.bin", "fineweb_val_000000.bin", "train_2.npy"):
        (tmp_path / name).write_bytes(npy() if name.endswith("npy") else llmc())
    for name in ("test.bin", "train.txt", "readme.md", "other.npy"):
        (tmp_path / name).write_bytes(b"what")
    data = open_folder(tmp_path)
    assert [shard.path.name for shard in data.train] == ["medieval_train_1.bin", "train_2.npy"]
    assert [shard.path.name for shard in data.val] == ["fineweb_val_000000.bin"]


def test_nanogpts_data_by_character_is_refused(tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(RAW)
    (tmp_path / "meta.pkl").write_bytes(b"a pickle")
    with pytest.raises(ShardError, match="--tokenizer bytes"):
        open_folder(tmp_path)


@NEEDS_POSIX
@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "a device"])
def test_what_is_not_a_file_is_refused_and_does_not_hang(make, tmp_path):
    path = tmp_path / "train.bin"
    path.symlink_to("/dev/zero") if make == "a device" else getattr(os, make)(path)
    with pytest.raises(ShardError, match="train.bin"):
        open_folder(tmp_path)


def test_ids_beyond_the_vocabulary_are_refused_at_the_start_without_a_manifest_too(tmp_path):
    splits = [[np.arange(500)], [np.full(700, 60_000)]]
    with pytest.raises(ShardError, match="val_0.bin holds token 60000, .* 50256"):
        open_folder(folder_of(tmp_path / "data", splits))


def folder_of(path: Path, splits: list[list[np.ndarray]]) -> Path:
    """Write the shards of both splits into the folder path, under names of its own."""
    path.mkdir(exist_ok=True)
    for split, shards in zip(("train", "val"), splits, strict=True):
        for i, tokens in enumerate(shards):
            write_shard(path / f"{path.name}_{split}_{i}.bin", tokens)
    return path


def test_the_fingerprint_is_of_all_shards_and_their_order_and_not_of_names(tmp_path):
    a, b, c = (np.random.default_rng(n).integers(0, 50257, 70_001) for n in range(3))
    late = np.append(a[:-1], 0)
    middle = a.copy()
    middle[30_000:40_000] = 0
    splits = [[[a, b], [c]], [[a, b], [c]], [[b, a], [c]], [[a, b], [a]], [[late, b], [c]],
              [[middle, b], [c]], [[a], [b, c]], [[a, b, c], [c]], [[a, b[:-1]], [c]]]  # fmt: skip
    folders = [folder_of(tmp_path / f"{i}", s) for i, s in enumerate(splits)]
    seen = [open_folder(folder).fingerprint for folder in folders]
    assert seen[0] == seen[1] and len(set(seen)) == len(seen) - 1
    assert all(re.fullmatch("[0-9a-f]{16}", fingerprint) for fingerprint in seen)
    assert seen[0] == "aa9f60bc77de2441"  # ec029db's: a run that it began can be resumed


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder as ec029db's prepare_data.py wrote it, with bytes as tokens."""
    rng, folder, splits = np.random.default_rng(0), tmp_path / "data", {}
    folder.mkdir()
    for split, sizes in {"train": (2000, 1300), "val": (700,)}.items():
        shards = []
        for i, size in enumerate(sizes):
            path = folder / f"{split}_{i:06d}.bin"
            write_shard(path, np.append(256, rng.integers(97, 123, size - 1)))
            entry = {"name": path.name, "tokens": size, "documents": 1, "largest_id": 256}
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            shards.append(entry | {"sha256": sha256, "end": [1, size]})
        splits[split] = {"shards": shards}
    tokenizer = {"name": "bytes", "sha256": "5b538882", "vocab_size": 257, "end_of_text": 256}
    manifest = {"format": 4, "input": ["a.txt"], "flags": {}, "files": "", "account": []}
    manifest |= splits | {"tokenizer": tokenizer}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_folder_of_an_older_version_opens_with_its_fingerprint(prepared):
    data = open_folder(prepared)
    assert data.fingerprint == "b32b564f784079ba"  # ec029db's
    assert (data.tokenizer, data.vocab_size, data.train[0].max_id) == ("bytes", 257, 256)
    assert [shard.num_tokens for shard in data.train + data.val] == [2000, 1300, 700]


def test_only_what_the_manifest_names_counts(prepared):
    before = open_folder(prepared)
    (prepared / "train_000009.bin").write_bytes(b"stray")
    assert open_folder(prepared) == before


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
        with pytest.raises(ShardError, match=r"data.outside\.bin is missing"):
            open_folder(prepared)


def test_a_manifest_that_is_about_other_shards_is_refused(prepared):
    rewrite(prepared, ("train", "shards", 0, "tokens"), 1999)
    with pytest.raises(ShardError, match="train_000000.bin is not the shard"):
        open_folder(prepared)


def test_a_largest_id_that_lies_lets_no_larger_token_through(prepared):
    rewrite(prepared, ("train", "shards", 0, "largest_id"), 100)
    loader = ShardLoader(open_folder(prepared).train, 1, 16)
    with pytest.raises(ShardError, match="train_000000.bin holds token [0-9]+, .* 100"):
        [loader.next_batch() for _ in range(len(loader))]


def test_with_a_manifest_the_fingerprint_is_of_its_sha256s(prepared):
    before = open_folder(prepared).fingerprint
    os.rename(prepared / "train_000000.bin", prepared / "other.bin")
    rewrite(prepared, ("train", "shards", 0, "name"), "other.bin")
    assert open_folder(prepared).fingerprint == before
    rewrite(prepared, ("train", "shards", 0, "sha256"), "0" * 64)
    assert open_folder(prepared).fingerprint != before


def test_a_folder_may_move(prepared, tmp_path):
    before = open_folder(prepared)
    shutil.move(prepared, tmp_path / "elsewhere")
    assert open_folder(tmp_path / "elsewhere").fingerprint == before.fingerprint


NO_MANIFESTS = {
    "nothing": b"", "null": b"null", "a list": b"[]", "a number": b"7", "deep": b"[" * 10**5,
    "deep objects": b'{"train":' * 10**5, "bytes": bytes(range(256)), "twice": b"{}{}",
    "Latin-1": b'{"train": "\xe9"}',
    "UTF-16": "{}".encode("utf-16"), "NULs": b"\0" * 4096,
}  # fmt: skip


@pytest.mark.parametrize("case", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused_in_one_line(case, prepared):
    (prepared / "manifest.json").write_bytes(NO_MANIFESTS[case])
    with pytest.raises(ShardError, match="manifest.json is damaged"):
        open_folder(prepared)


HOSTILE = [
    KeyError, None, True, -1, 0, 65536, 1.5, math.nan, math.inf, 10**40, "", "x", "\0", "..",
    "../../etc/passwd", "\ud800", "\x1b[2J", "a" * 300, [], [[]], {}, ["x"] * 9,
]  # fmt: skip
PLACES = [
    ("tokenizer",), ("tokenizer", "name"), ("train",), ("val", "shards"), ("train", "shards", 0),
    *(("train", "shards", 0, key) for key in ("name", "tokens", "largest_id", "sha256")),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_any_field_of_a_manifest_may_hold_anything(place, prepared):
    """It is taken or refused in one line, and no token beyond the largest id comes through."""
    content = (prepared / "manifest.json").read_bytes()
    for value in HOSTILE:
        (prepared / "manifest.json").write_bytes(content)
        rewrite(prepared, place, value)
        try:
            data = open_folder(prepared)
            loader = ShardLoader(data.train, 1, 16)
            assert max(int(loader.next_batch()[1].max()) for _ in range(len(loader))) <= 256
        except (ShardError, OSError) as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
