"""Tests ../dataloader.py."""

import io
import os
import re
import shlex
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_shard

import dataloader
from dataloader import (
    DamagedShard,
    Shard,
    ShardError,
    ShardLoader,
    epoch_offset,
    open_folder,
    open_shard,
)

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
    "a.bin, empty": (b"", "starts with 0, 0 instead of 20240520, 1"),
    "a.bin, header only": (llmc(0, tokens=b""), "holds 0 tokens; its header says 0"),
    "a.bin, cut by a byte": (llmc()[:-1], "holds 999.5 tokens; its header says 1,000"),
    "a.bin, cut in half": (llmc()[:1512], "holds 244 tokens; its header says 1,000"),
    "a.bin, too long": (llmc() + b"ab", "holds 1,001 tokens; its header says 1,000"),
    "a.bin, foreign": (llmc(magic=20240521), "starts with 20240521, 1 instead"),
    "a.bin, of Llama 3": (llmc(magic=20240801, version=7), "starts with 20240801, 7 instead"),
    "a.bin, other version": (llmc(version=2), "starts with 20240520, 2 instead"),
    "a.npy, int32": (npy(TOKENS.astype("<i4")), "holds int32"),
    "a.npy, float64": (npy(TOKENS.astype("<f8")), "holds float64"),
    "a.npy, big-endian": (npy(TOKENS.astype(">u2")), "holds >u2"),
    "a.npy, in rows": (npy(TOKENS.reshape(2, 500)), "of shape (2, 500)"),
    "a.npy, objects": (npy(TOKENS.astype(object)), "holds object"),
    "a.npy, cut": (npy()[:-1], "holds 999.5 tokens; its header says 1,000"),
    "a.npy, header without end": (npy().replace(b"}", b" "), ""),
    "a.npy, header without sense": (npy().replace(b"<u2", b"<02"), ""),
    "train.bin, odd size": (RAW[:-1], "holds 999.5 tokens; its header says 999"),
    "train.bin, text": (b"To be, or not to be\n" * 50, "holds text or 32-bit"),
    "train.bin, int32": (TOKENS.astype("<i4").tobytes(), "holds text or 32-bit numbers"),
    "train.bin, id too large": ((TOKENS + 49258).tobytes(), "and 50257 is not a GPT-2 token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_a_whole_shard_is_refused(case, tmp_path):
    name, (content, why) = case.split(",")[0], REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not a complete shard: .*{re.escape(why)}"):
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
    except ValueError as error:
        assert str(error).startswith(f"{path} is not a complete shard: ")
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
    with pytest.raises(DamagedShard, match="train_2.bin ends before token 17: copy it again"):
        ShardLoader(shards, 44, T).next_batch()


def test_an_id_beyond_the_vocabulary_is_an_error_that_names_it(shards):
    limited = [replace(shard, max_id=150) for shard in shards]
    loader = ShardLoader(limited, 1, T)
    with pytest.raises(DamagedShard, match="train_3.bin holds token 15[1-5], above 150: prepare"):
        [loader.next_batch() for _ in range(44)]


def test_a_shard_that_can_not_be_read_is_an_error_that_names_it(shards):
    shards[0].path.unlink()
    with pytest.raises(DamagedShard, match="train_0.bin can't be read: No such file") as caught:
        ShardLoader(shards, 1, T).next_batch()
    assert caught.value.exit_code == 6 and dataloader.ShardError.exit_code == 2


def test_a_shard_of_one_token_is_refused_with_a_cure_that_works(tmp_path):
    write_shard(tmp_path / "a.bin", np.zeros(1))
    with pytest.raises(
        ValueError, match="tokens, but the longest has 1: prepare more text, or try --seq-len 1"
    ):
        ShardLoader([open_shard(tmp_path / "a.bin")], B=1, T=8)


def test_a_sequence_longer_than_every_shard_is_refused(shards):
    assert len(ShardLoader(shards, B=1, T=100)) == 1
    why = "needs shards of 102 tokens, but the longest has 101: prepare .*, or try --seq-len 100"
    with pytest.raises(ValueError, match=why):
        ShardLoader(shards, B=1, T=101)


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


def test_a_command_that_is_offered_can_be_pasted(tmp_path, monkeypatch):
    folder = tmp_path / "my texts"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ShardError) as error:
        open_folder(folder)
    words = shlex.split(str(error.value).partition("from its text: ")[2].partition(";")[0])
    tokens = str(Path("data", "my texts-tokens"))
    assert os.path.samefile(words[1], dataloader.__file__.replace("dataloader", "prepare_data"))
    assert words[2:] == ["--input", str(folder), "--data-dir", tokens]
    (folder / "prepare.py").touch()  # nanoGPT's, which has not been run
    (folder / "readme.md").touch()
    with pytest.raises(ShardError) as error:
        open_folder(folder)
    words = shlex.split(str(error.value).partition("to make some: ")[2].partition(", if")[0])
    assert words == ["python", str(folder / "prepare.py")]
    assert "to make some from its text: python" in str(error.value)
