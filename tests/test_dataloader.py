"""Tests ../dataloader.py."""

import io
import json
import os
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import prepare, write_shard

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


def test_llmc_format(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 65536, 1009)
    write_shard(tmp_path / "a.bin", tokens)
    assert (tmp_path / "a.bin").read_bytes() == llmc(1009, tokens=struct.pack("<1009H", *tokens))
    shard = open_shard(tmp_path / "a.bin")
    assert np.array_equal(shard.read(0, shard.num_tokens), tokens)
    assert np.array_equal(shard.read(17, 5), tokens[17:22])


REFUSED = {  # the first word is the file's name
    "a.bin, header only": (llmc(0, tokens=b""), "0 tokens, and its header says 0"),
    "a.bin, cut by a byte": (llmc()[:-1], "999.5 tokens, and its header says 1,000"),
    "a.bin, too long": (llmc() + b"ab", "1,001 tokens, and its header says 1,000"),
    "a.bin, of Llama 3": (llmc(magic=20240801, version=7), "[20240801, 7], not"),
    "a.npy, int32": (npy(TOKENS.astype("<i4")), "int32"),
    "a.npy, big-endian": (npy(TOKENS.astype(">u2")), ">u2"),
    "a.npy, in rows": (npy(TOKENS.reshape(2, 500)), "(2, 500)"),
    "a.npy, a pickle": (npy(TOKENS.astype(object)), ""),
    "a.npy, cut": (npy()[:-1], ""),
    "a.npy, too long": (npy() + b"ab", "1,001 tokens"),
    "train.bin, odd size": (RAW[:-1], "999.5 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_shards(case, tmp_path):
    name, (content, why) = case.split(",")[0], REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardError, match=f"{name} .*{re.escape(why)}"):
        open_shard(tmp_path / name)


T = 4
FIRSTS = [*range(0, 100, T), *range(104, 120, T), *range(121, 181, T)]  # of the 44 sequences


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


def test_targets_across_shards(shards):
    inputs, targets = ShardLoader(shards, 44, T, seed=1).next_batch()
    assert sorted(inputs[:, 0].tolist()) == FIRSTS
    assert inputs.dtype == targets.dtype == np.int64  # torch's embeddings and loss take no uint16
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(T))
    assert np.array_equal(targets, inputs + 1)


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
def test_three_epochs(sizes, seed, tmp_path):
    """In one order for any batch and ranks, also after a resume on others in the second epoch."""
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
    order = dealt(shards, 1, 1, seed, count=3 * length)
    epochs = [order[i * length : (i + 1) * length] for i in range(3)]
    if seed is None:
        assert epochs == expected  # the disk's order
    else:
        assert [sorted(epoch) for epoch in epochs] == [sorted(starts) for starts in expected]
    for B, ranks in ((2, 1), (8, 2), (3, 3), (1, 4)):
        begun = dealt(shards, B, ranks, seed, count=length + length // 2)
        ended = dealt(shards, 1, 1 + ranks % 3, seed, start=len(begun), count=3 * length)
        assert (begun + ended)[: 3 * length] == order


def test_epoch_offsets():
    offsets = {epoch_offset(seed, epoch, shard, 1024)
               for seed in range(4) for epoch in range(1, 5) for shard in range(4)}  # fmt: skip
    assert len(offsets) > 58 and epoch_offset(7, 0, 3, 1024) == 0
    assert min(offsets) < 100 and max(offsets) > 924


def test_prefetch(shards, monkeypatch):
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


def test_shard_cut_in_use(shards):
    os.truncate(shards[2].path, shards[2].path.stat().st_size - 1)
    with pytest.raises(ShardError, match="train_2.bin ends before token 17"):
        ShardLoader(shards, 44, T).next_batch()


def test_id_beyond_vocabulary(shards):
    loader = ShardLoader(shards, 1, T)
    largest = max(loader[number].max() for number in range(len(loader)))
    limited = ShardLoader([replace(shard, max_id=largest - 1) for shard in shards], 1, T)
    text = f"train_3.bin holds token {largest}, above {largest - 1}: prepare"
    with pytest.raises(ShardError, match=text):
        [limited.next_batch() for _ in range(44)]


def test_sequence_too_long(shards):
    assert len(ShardLoader(shards, B=1, T=100)) == 1
    with pytest.raises(ShardError, match="--seq-len 101 needs .* 102 tokens, .* has 101"):
        ShardLoader(shards, B=1, T=101)
    short = replace(shards[0], num_tokens=1)
    with pytest.raises(ShardError, match="--seq-len 1 needs .* 2 tokens, .* has 1"):
        ShardLoader([short], B=1, T=1)


def shuffle(length: int, seed=1, epoch=0, count: int | None = None) -> list[int]:
    return [dataloader.permuted(n, length, seed, epoch) for n in range(count or length)]


def test_permutation():
    for length in (*range(1, 301), 10_007):
        assert sorted(shuffle(length)) == list(range(length))


def test_permutation_of_long_ranges():
    for length in (2**16 + 1, 10**9 + 7, 2**40):  # too long to try all
        some = shuffle(length, count=2000)
        assert len(set(some)) == 2000 and min(some) >= 0 and max(some) < length
        assert sum(some) / 2000 == pytest.approx(length / 2, rel=0.07)  # 5 standard deviations
        steps = np.abs(np.diff(some))  # no neighbours stay together
        assert steps.mean() == pytest.approx(length / 3, rel=0.1)


def test_permutation_by_seed_and_epoch():
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
def test_formats(content, suffix, tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.{suffix}").write_bytes(content)
    assert stream(tmp_path, "train") == stream(tmp_path, "val") == TOKENS.tolist()
    data = open_folder(tmp_path)
    assert (data.tokenizer, data.vocab_size, data.train[0].max_id) == ("gpt2", 50257, 50256)


@pytest.mark.parametrize("names", [
    None, [], ["train_0.bin"], ["val_0.npy", "train.txt"], ["test.bin", "val_0.bin"],
])  # fmt: skip
def test_folder_without_a_split(names, tmp_path):
    for name in names or []:
        (tmp_path / name).write_bytes(npy() if name.endswith("npy") else llmc())
    folder = tmp_path / "nowhere" if names is None else tmp_path
    with pytest.raises(ShardError, match="--data-dir .* prepare_data.py"):
        open_folder(folder)


def test_nanogpt_by_character(tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(RAW)
    (tmp_path / "meta.pkl").write_bytes(b"a pickle")
    with pytest.raises(ShardError, match="--tokenizer bytes"):
        open_folder(tmp_path)


def test_fingerprint_without_manifest(tmp_path):
    a, b, c = (np.random.default_rng(n).integers(0, 50257, 70_001) for n in range(3))
    late = np.append(a[:-1], 0)
    middle = a.copy()
    middle[30_000:40_000] = 0
    splits = [[[a, b], [c]], [[a, b], [c]], [[b, a], [c]], [[a, b], [a]], [[late, b], [c]],
              [[middle, b], [c]], [[a], [b, c]], [[a, b, c], [c]], [[a, b[:-1]], [c]]]  # fmt: skip
    seen = []
    for n, both in enumerate(splits):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        for split, shards in zip(("train", "val"), both, strict=True):
            for i, tokens in enumerate(shards):
                write_shard(folder / f"{n}_{split}_{i}.bin", tokens)
        for name in ("test.bin", "train.txt"):  # no shards
            (folder / name).write_bytes(b"what")
        seen.append(open_folder(folder).fingerprint)
    assert seen[0] == seen[1] and len(set(seen)) == len(seen) - 1
    assert all(re.fullmatch("[0-9a-f]{16}", fingerprint) for fingerprint in seen)
    assert seen[0] == "aa9f60bc77de2441"  # of an older version: its runs can be resumed


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder that prepare_data.py has written, with bytes as tokens: two shards and one."""
    rng = np.random.default_rng(0)
    files = [tmp_path / name for name in ("1.txt", "2.txt", "val.txt")]
    for file, size in zip(files, (1999, 1299, 699), strict=True):
        file.write_bytes(rng.integers(97, 123, size).astype(np.uint8).tobytes())
    line = ["--input", *files[:2], "--val-input", files[2], "--shard-tokens", 2000]
    assert prepare(tmp_path / "data", *line) == 0
    return tmp_path / "data"


def rewrite(folder: Path, name: str, value):
    """Change one field of the first shard in folder's manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["train"]["shards"][0][name] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_manifest_of_other_shards(prepared):
    rewrite(prepared, "tokens", 1999)
    with pytest.raises(ShardError, match="train_000000.bin is not the shard"):
        open_folder(prepared)


def test_fingerprint_with_manifest(prepared):
    before = open_folder(prepared).fingerprint
    assert before == "b32b564f784079ba"  # of an older version: its runs can be resumed
    os.rename(prepared / "train_000000.bin", prepared / "other.bin")
    rewrite(prepared, "name", "other.bin")
    assert open_folder(prepared).fingerprint == before
    rewrite(prepared, "sha256", "0" * 64)
    assert open_folder(prepared).fingerprint != before


NO_MANIFESTS = {"nothing": b"", "a list": b"[]", "deep": b"[" * 10**5, "bytes": bytes(range(256))}


@pytest.mark.parametrize("case", NO_MANIFESTS)
def test_no_manifest(case, prepared):
    (prepared / "manifest.json").write_bytes(NO_MANIFESTS[case])
    with pytest.raises(ShardError, match="manifest.json is damaged"):
        open_folder(prepared)
