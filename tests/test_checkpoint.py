"""Tests ../support/checkpoint.py: no damage and no lie of a checkpoint is believed."""

import os
import struct
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import each_flipped, state_of

from model import GPT, GPTConfig
from support.checkpoint import (
    PARTS,
    checkpoints,
    digest,
    is_good,
    load_archive,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from support.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("shapes_at_hand")
OTHERS = [
    *(None, True, -1, 0.5, 2**70, 1e999, float("nan"), "x", [], [1], {}, {"a": 1}, {1: 1.0}),
    *(torch.zeros(2), [torch.zeros(2)], {"a": {"b": {}}}, {0: {"step": torch.zeros(())}}),
]


def written(folder: Path, saved: dict, name: str = "checkpoint_000007.pt") -> Path:
    """saved as an attacker would write it, with a digest that fits."""
    torch.save(saved | {"digest": digest(saved)}, folder / name)
    return folder / name


def same(value, other) -> bool:
    """Whether all that is in them is the same, to the bit."""
    if isinstance(value, torch.Tensor):
        is_float = value.dtype == other.dtype == torch.float32
        return is_float and torch.equal(value.view(torch.int32), other.view(torch.int32))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[n], other[n]) for n in value)
    return value == other


def check_flips(path: Path, places: Sequence[int]) -> int:
    """How many of these flips are loaded. Each of those loads what was written, and none of the
    others counts as good in a rotation."""
    expected, loaded = read_checkpoint(path), 0
    assert expected["digest"] == digest(expected)
    for place in each_flipped(path, places):
        try:
            saved = read_checkpoint(path)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
            assert not is_good(path), place
        else:
            loaded += 1
            assert same(saved, expected) and is_good(path), place
    return loaded


def test_a_flipped_bit_in_the_directory_of_a_checkpoint_is_loaded_equal_or_refused(tmp_path):
    """PyTorch skips a part that this directory calls a folder, and leaves memory as it was."""
    path = save_checkpoint(tmp_path, state_of(7, optimizer={}), keep=2)
    start = path.read_bytes().index(b"PK\1\2")
    places = range(8 * start, 8 * path.stat().st_size, 7)
    assert 0 < check_flips(path, places) < len(places) / 3


def contents(path: Path) -> set[int]:
    """The positions of the bytes in an archive that its CRC-32s are of."""
    found, data = set(), path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            name, extra = struct.unpack_from("<HH", data, part.header_offset + 26)
            start = part.header_offset + 30 + name + extra
            assert data[start : start + part.file_size] == archive.read(part)
            found |= {*range(start, start + part.file_size)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_a_checkpoint_is_loaded_equal_or_refused(
    tmp_path, bit, record_property
):
    """Of each byte; in what the parts hold one bit of each, since a CRC-32 is over all of them."""
    path = save_checkpoint(tmp_path, state_of(7, optimizer={}), keep=2)
    inside = contents(path)
    places = [8 * n + bit for n in range(path.stat().st_size) if n not in inside or n % 8 == bit]
    loaded = check_flips(path, places)
    record_property("flips", f"{len(places):,}, {loaded:,} loaded, all equal")
    assert 0 < loaded < len(places)


def lies(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that a file may hold in the place of this one."""
    wide = torch.zeros(1)
    return {
        "of 3 numbers": torch.zeros(3), "scalar": torch.zeros(()), "empty": torch.zeros(0),
        "a row short": tensor.detach()[:-1].clone() if tensor.dim() else torch.zeros(2),
        "expanded": wide.expand(tensor.shape if tensor.dim() else (3,)),
        "endless": wide.expand(1 << 40), "transposed": torch.zeros(3, 5).t(),
        "double": tensor.detach().double(), "half": tensor.detach().half(),
        "whole": torch.zeros(tensor.shape, dtype=torch.int64),
        "complex": torch.zeros(tensor.shape, dtype=torch.complex64),
        "float8": torch.zeros(tensor.shape).to(torch.float8_e4m3fn),
        "sparse": torch.zeros(3, 3).to_sparse(), "meta": torch.zeros(tensor.shape, device="meta"),
        "a parameter": torch.nn.Parameter(tensor.detach().clone()),
        "nan": torch.full(tensor.shape, torch.nan), "not a tensor": 1.0,
    }  # fmt: skip


def step_with(path: Path):
    """What a resumed run does with a checkpoint: load it, and update the weights."""
    saved = read_checkpoint(path)
    model = GPT(GPTConfig(4, 2, 1, 1, 4, False))
    decayed, others = model.decay_groups()
    matrices = model.matrices() if saved["identity"]["muon"] else ()
    optimizer = Optimizer([{"params": decayed}, {"params": others}], matrices, fused=True)
    model.load_state_dict(saved["model"])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
    model(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)).backward()
    optimizer.step()


def num_refused(paths: list[Path]) -> int:
    """How many of these checkpoints a run refuses, in a process of its own; below 0 if a signal
    killed it."""
    sys.stderr.flush()
    child = os.fork()
    if not child:
        count = 0
        try:
            for path in paths:
                try:
                    step_with(path)
                except ValueError:
                    count += 1
        finally:
            os._exit(count)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(sys.platform == "win32", reason="fork is POSIX's")
@pytest.mark.filterwarnings("ignore")  # of sparse tensors
@pytest.mark.parametrize("muon", [False, True])
def test_a_tensor_that_does_not_fit_its_parameter_is_refused_before_it_is_used(tmp_path, muon):
    """The fused AdamW would write past the end of it. Each lie in every third place."""
    plain = state_of(7, muon)
    places = [("model", name) for name in plain["model"]]
    places += [("optimizer", i, n) for i in plain["optimizer"] for n in plain["optimizer"][i]]
    torch.set_num_threads(1)  # a process that has forked has no other threads
    step_with(written(tmp_path, plain))  # here first: it imports what takes each process seconds
    assert num_refused([written(tmp_path, plain)]) == 0
    cases = 0
    for place in places[::3]:
        saved = plain | {place[0]: dict(plain[place[0]])}
        entry = saved[place[0]]
        for name in place[1:-1]:
            entry[name] = entry = dict(entry[name])
        paths = []
        for kind, tensor in lies(entry[place[-1]]).items():
            entry[place[-1]] = tensor
            (tmp_path / kind).mkdir(exist_ok=True)
            try:
                paths.append(written(tmp_path / kind, saved))
            except (RuntimeError, NotImplementedError):  # it has no digest
                paths.append(tmp_path / kind / "checkpoint_000007.pt")
                torch.save(saved | {"digest": digest(plain)}, paths[-1])
        assert num_refused(paths) == len(paths), place
        cases += len(paths)
    assert cases > 250


@pytest.mark.parametrize("muon", [False, True])
def test_the_state_of_another_optimizer_is_refused(tmp_path, muon):
    for part in ("optimizer", "identity"):
        mixed = state_of(7, muon) | {part: state_of(7, not muon)[part]}
        with pytest.raises(ValueError, match="its optimizer holds"):
            read_checkpoint(written(tmp_path, mixed))


def test_a_part_of_another_type_is_refused_in_one_line(tmp_path):
    """Each part, and each entry of those that are dicts, is replaced by each other thing."""
    plain, cases = state_of(7), 0
    assert read_checkpoint(written(tmp_path, plain))
    for name in PARTS:
        inner = plain.get(name)
        names = list(inner)[:2] if isinstance(inner, dict) else []
        for other in OTHERS:
            changes = [{name: other}, *({name: inner | {n: other}} for n in names)]
            for saved in (plain | change for change in changes):
                torch.save({"digest": digest(plain)} | saved, tmp_path / "checkpoint_000007.pt")
                cases += 1
                try:
                    read_checkpoint(tmp_path / "checkpoint_000007.pt")
                except ValueError as error:
                    assert len(str(error).splitlines()) == 1
                else:
                    assert saved == plain or digest(saved) == digest(plain)
    assert cases > 200


@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_that_lacks_a_part_is_refused(tmp_path, name):
    saved = state_of(7)
    saved["digest"] = digest(saved)
    del saved[name]
    torch.save(saved, tmp_path / "checkpoint_000007.pt")
    with pytest.raises(ValueError, match=f"it lacks {name}: another program wrote it"):
        read_checkpoint(tmp_path / "checkpoint_000007.pt")


def test_names_that_only_look_like_checkpoints_are_none(tmp_path):
    numbers = ("\u00b2", "7", "", "0000007", "\u0660" * 5 + "\u0661", "9" * 99, "-00001", "1e0005")
    for name in (f"checkpoint_{number}.pt" for number in numbers):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "checkpoint_000003.pt").mkdir()
    assert not checkpoints(tmp_path)
    path = save_checkpoint(tmp_path, state_of(1234567, optimizer={}), keep=2)
    assert checkpoints(tmp_path) == [path]


def test_a_checkpoint_that_is_removed_while_it_is_looked_for_is_skipped(tmp_path):
    """As by the rotation of a run that goes on: the next one, which is newer, is taken."""
    save_checkpoint(tmp_path, state_of(1), keep=2)
    told = []

    def gather(value):
        if value == [tmp_path / "checkpoint_000001.pt"]:  # after the list was made
            save_checkpoint(tmp_path, state_of(2), keep=2)
            value[0].unlink()
        return [value]

    path, saved = newest_checkpoint(tmp_path, told.append, gather)
    assert path.name == "checkpoint_000002.pt" and saved["step"] == 2
    assert len(told) == 1 and "No such file" in told[0] and "damaged" not in told[0]


def test_ranks_take_the_newest_checkpoint_that_all_of_them_can_read(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, state_of(step), keep=3)
    told = []

    def gather(value):
        """The other rank can't read step 3, and has another step 2."""
        if isinstance(value, list):
            return [value, value]
        reads = len(told)
        return [value, [(None, "it is damaged there"), ("other", ""), value][reads]]

    path, _ = newest_checkpoint(tmp_path, told.append, gather)
    assert path.name == "checkpoint_000001.pt"
    assert [text.split(";")[0].split("/")[-1] for text in told] == [
        "it is damaged there", "checkpoint_000002.pt is not the same on all ranks"]  # fmt: skip


def test_an_archive_takes_no_more_memory_than_its_file(tmp_path):
    """Packed, or with one part under many names."""
    path = tmp_path / "bomb.pt"
    torch.save({"model": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for how in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(path, "w", how) as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
        with pytest.raises(ValueError, match="torch.save did not write"):
            load_archive(path)
    torch.save({"model": bytearray(1000)}, path)
    with pytest.raises(ValueError, match="more than tensors"):
        load_archive(path)
