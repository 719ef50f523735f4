"""Tests ../dataloader.py."""

import io
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
from support import corpus

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


def test_the_largest_id_is_numpys(tmp_path):
    tokens = np.zeros((1 << 20) + 5, np.uint16)  # more than is read at a time
    tokens[[0, -1]] = 50000, 50001
    write_shard(tmp_path / "a.bin", tokens)
    assert open_shard(tmp_path / "a.bin").largest_id() == tokens.max()


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
        if length < 1000 or length % 37 == 0:  # the others differ in where the walk ends alone
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
