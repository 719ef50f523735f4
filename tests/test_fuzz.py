"""Any field of a file that the programs take from others, and any flag, may hold anything: it is
taken, or refused by an error that main prints in one line, and never ends in a traceback.

FUZZ_CASES=1000 tries so many of each kind."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import each_flipped, flags, write_shard
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import train_gpt2
from config import TrainConfig, read_flags, resolve, to_take
from dataloader import ShardError, ShardLoader, open_folder, open_shard
from model import GPT, GPTConfig
from support import convert
from support.checkpoint import find_weights, load_model, save_weights
from support.cli import RunError, UserError, spell
from support.tokenizer import END_OF_TEXT, find_tokenizer, read_tokenizer, train_tokenizer
from support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
each_case = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "200")),
    suppress_health_check=list(HealthCheck),
    **{"deadline": None, "derandomize": True, "database": None},
)
NUMBERS = st.integers(-3, 300) | st.floats() | st.booleans()
NUMBERS |= st.sampled_from([0, 1, -1, 2, 3, 0.5, 1e999])
LARGE = st.sampled_from([65536, 2**31, 2**63, 10**9, 10**40])  # too large for sizes of networks
TEXTS = st.text(max_size=20)
TEXTS |= st.sampled_from(["", "\0", "../../etc/passwd", "/dev/zero", "gpt2", "\x1b[2J", "\n"])
ANYTHING = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CHANGES = st.sampled_from(["replaced", "replaced", "removed", "added"])
ALONE = World(0, 1, torch.device("cpu"))
SMALLEST = GPTConfig(vocab_size=3, seq_len=2, n_layer=1, n_head=1, n_embd=2)


def is_taken(function: Callable, *args) -> bool:
    """Return whether function(*args) takes its input; it may refuse it by these errors alone."""
    try:
        function(*args)
        return True
    except (RunError, ShardError):
        return False


def places(value, path: tuple = ()) -> list[tuple]:
    """Return the path of each field of value, and of those inside."""
    inner: list = [*value.items()] if isinstance(value, dict) else []
    inner += enumerate(value[:3]) if isinstance(value, list) else []
    return [path] * bool(path) + [p for name, part in inner for p in places(part, (*path, name))]


def changed(value, path: tuple, change: str, new):
    """Return value with the field at path replaced or removed, or another one beside it."""
    value = copy.copy(value)
    name, *rest = path
    if rest:
        value[name] = changed(value[name], tuple(rest), change, new)
    elif change == "removed":
        del value[name]
    elif change == "replaced" or isinstance(value, list):
        value[name] = new
    else:
        value[str(new)[:20]] = new
    return value


def write_changed(path: Path, plain: dict, place: tuple, change: str, new):
    """Write a JSON file with a changed field."""
    try:
        path.write_text(json.dumps(changed(plain, place, change, new)), "utf-8")
    except (UnicodeEncodeError, ValueError):
        reject()


# ---- Folders of other people ---------------------------------------------------------------------


@pytest.fixture
def hf_folder(tmp_path) -> Path:
    (tmp_path / "hf").mkdir()
    save_weights(tmp_path / "hf", GPT(SMALLEST), None, "")
    assert is_taken(load_model, str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.mark.parametrize("own", [False, True])
def test_any_field_of_a_config_json_may_hold_anything(hf_folder, own):
    plain = json.loads((hf_folder / "config.json").read_text())
    if not own:
        del plain["train_gpt2"]

    @each_case
    @given(st.sampled_from(places(plain)), CHANGES, ANYTHING)
    def check(place, change, new):
        write_changed(hf_folder / "config.json", plain, place, change, new)
        is_taken(load_model, str(hf_folder))

    check()


@pytest.mark.parametrize("name", ["vocab_size", "n_positions", "n_embd"])
def test_a_size_that_no_memory_holds_is_refused(hf_folder, name):
    plain = json.loads((hf_folder / "config.json").read_text())
    for size in (2**62, 10**40):
        write_changed(hf_folder / "config.json", plain, (name,), "replaced", size)
        assert not is_taken(load_model, str(hf_folder))


def test_any_bit_of_a_safetensors_header_may_be_flipped(hf_folder):
    path = hf_folder / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in each_flipped(path, range(0, 8 * end, 5)):
        is_taken(load_model, str(hf_folder))
    for size in range(0, len(whole), 23):
        path.write_bytes(whole[:size])
        assert not is_taken(load_model, str(hf_folder))


NO_OBJECTS = {"nothing": b"", "a list": b"[]", "null": b"null", "deep": b"[" * 10**5,
              "UTF-16": b"\xff\xfe", "Latin-1": b'{"\xe9": 1}'}  # fmt: skip


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
@pytest.mark.parametrize("name", ["config.json", "vocab.json", "tokenizer.json"])
def test_what_is_no_json_object_is_refused(hf_folder, name, content):
    (hf_folder / "merges.txt").touch()
    (hf_folder / name).write_bytes(content)
    assert not is_taken(load_model, str(hf_folder))


def tokenizer_files() -> Iterator[tuple[str, dict, dict[str, bytes]]]:
    """Yield the name and content of each file of a tokenizer, and the other files."""
    ours = train_tokenizer(["abc abd  xyz " * 30], 270)
    files = ours.files(8)
    for name in ("vocab.json", "tokenizer_config.json"):
        plain = json.loads(files[name])
        yield name, plain, files
    yield "special_tokens_map.json", {"eos_token": {"content": END_OF_TEXT}}, files
    yield "added_tokens.json", {"<pad>": ours.size, "<x>": ours.size + 1}, files
    added = [{"id": ours.end_of_text, "content": END_OF_TEXT, "special": True}]
    vocab = {token: i for token, i in ours.vocab.items() if token != END_OF_TEXT}
    model = {"type": "BPE", "vocab": vocab, "merges": [m.split(" ") for m in ours.merges]}
    split = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    whole = {"added_tokens": added, "pre_tokenizer": split, "model": model, "normalizer": None}
    yield "tokenizer.json", whole, {}


@pytest.mark.parametrize(
    "name", ["vocab.json", "tokenizer_config.json", "special_tokens_map.json",
             "added_tokens.json", "tokenizer.json"]
)  # fmt: skip
def test_any_field_of_a_tokenizer_may_hold_anything(tmp_path, name):
    """What is taken encodes and decodes any text."""
    plain, files = next(rest for first, *rest in tokenizer_files() if first == name)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    everywhere = places(plain)
    some = everywhere[:60] + everywhere[-30:]  # all but most of the bytes

    def use():
        ours = read_tokenizer(tmp_path)
        for text in ("abc abd", "é\0 <|endoftext|>", ""):
            ids = ours.encode(text)
            assert max(ids, default=0) < ours.size <= 1 << 16
            assert ours.decode(ids) == text
        ours.files(8)
        ours.decode(range(1 << 16))

    (tmp_path / name).write_text(json.dumps(plain), "utf-8")
    assert is_taken(use)

    @each_case
    @given(st.sampled_from(some), CHANGES, ANYTHING | LARGE)
    def check(place, change, new):
        write_changed(tmp_path / name, plain, place, change, new)
        is_taken(use)

    check()


def test_any_line_of_merges_may_hold_anything(tmp_path):
    files = train_tokenizer(["abc abd  xyz " * 30], 270).files(8)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    lines = files["merges.txt"].decode().split("\n")

    @each_case
    @given(st.integers(0, len(lines) - 1), st.binary(max_size=9) | TEXTS.map(str.encode))
    def check(at, new):
        content = [*map(str.encode, lines[:at]), new, *map(str.encode, lines[at + 1 :])]
        (tmp_path / "merges.txt").write_bytes(b"\n".join(content))
        is_taken(read_tokenizer, tmp_path)

    check()


def test_any_field_of_a_manifest_may_hold_anything(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    plain = json.loads((data_dir / "manifest.json").read_text())
    some = [path for path in places(plain) if path[0] in ("train", "val", "tokenizer")]

    def use():
        data = open_folder(tmp_path / "data")
        find_tokenizer(data.folder, data.tokenizer)
        GPTConfig(min(data.vocab_size, 300))
        for shards in (data.train, data.val):
            loader = ShardLoader(shards, 1, 16)
            assert max(int(loader.next_batch()[1].max()) for _ in range(len(loader))) < 257

    assert is_taken(use)

    @each_case
    @given(st.sampled_from(some), CHANGES, ANYTHING | LARGE)
    def check(place, change, new):
        write_changed(tmp_path / "data/manifest.json", plain, place, change, new)
        is_taken(use)

    check()


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_any_bytes_of_a_shard_may_be_others(tmp_path, suffix):
    path, tokens = tmp_path / f"train{suffix}", np.arange(500)
    write_shard(path, tokens) if suffix == ".bin" else np.save(path, tokens.astype("<u2"))
    plain = path.read_bytes()

    def use():
        shard = open_shard(path)
        assert len(shard.read(0, shard.num_tokens)) == shard.num_tokens

    assert is_taken(use)

    @each_case
    @given(st.integers(0, 200), st.binary(max_size=12), st.integers(0, len(plain)))
    def check(at, new, size):
        content = plain[:at] + new + plain[at + len(new) :]
        path.write_bytes(content[: size if size % 2 else None])
        is_taken(use)

    check()


# ---- Checkpoints ---------------------------------------------------------------------------------


def hostile_tensors() -> list:
    """Return tensors that may stand in the place of one of shape (2, 2)."""
    x = torch.eye(2)
    tensors: list = [x.to(dtype) for dtype in (torch.half, torch.int64, torch.complex64)]
    tensors += [x.to_sparse(), x.to_sparse_csr(), x.to("meta"), x / 0, x + 3e38, x.double() + 1e300]
    tensors += [x[0], x[0, 0], x[:0], x[:1].t(), x[:1, :1].expand(2**30, 2**30), x[None], [[1.0]]]
    tensors += [torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), x.to(torch.float8_e4m3fn)]
    return [*tensors, torch.nn.Parameter(x)]


def test_any_field_of_nanogpts_checkpoint_may_hold_anything(tmp_path, capsys):
    names = {"block_size": "seq_len"} | {f.name: f.name for f in fields(GPTConfig)}
    args = {theirs: getattr(SMALLEST, ours) for theirs, ours in names.items()}
    weights = GPT(SMALLEST).state_dict()
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = torch.ones(3, 2)
    plain = {"model": weights, "model_args": args | {"bias": True}, "iter_num": 5}

    def check(value):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        try:
            torch.save(value, tmp_path / "ckpt.pt")
        except Exception:
            reject()
        code = convert.main([str(tmp_path / "ckpt.pt"), str(tmp_path / "hf")])
        assert code in (0, 2) and capsys.readouterr().err.count("\n") >= (code == 2)
        if code == 0:  # without a tokenizer
            assert is_taken(find_weights, str(tmp_path / "hf"))

    for tensor in hostile_tensors():
        weights = plain["model"] | {"transformer.wpe.weight": tensor}
        check(plain | {"model": weights})

    @each_case
    @given(st.sampled_from(places(plain)), CHANGES, ANYTHING)
    def check_field(place, change, new):
        check(changed(plain, place, change, new))

    check_field()


# ---- Flags ---------------------------------------------------------------------------------------


def test_any_flag_may_be_given_anything(data_dir, tmp_path, monkeypatch, capsys):
    """What is taken would train for a day: only what is refused goes through main."""
    monkeypatch.chdir(tmp_path)
    names = st.sampled_from([spell(f.name) for f in fields(TrainConfig)])
    texts = TEXTS | (NUMBERS | LARGE).map(str) | st.sampled_from(["--", "-", "=", "1e", "9" * 40])
    texts = texts.filter(lambda text: "\0" not in text)  # no argument of a program holds one

    @each_case
    @given(names, texts, names, texts, st.booleans())
    def check(name, text, other, more, joined):
        pairs = [[f"{name}={text}", f"{other}={more}"], [name, text, other, more]]
        line = [*flags(data_dir=data_dir, out_dir="new"), *pairs[not joined]]
        try:
            resolve(*read_flags(line, ""), None, ALONE)
            reject()
        except UserError:
            capsys.readouterr()
            assert train_gpt2.main(line) == 2
            assert capsys.readouterr().err.count("\n") == 1
        except SystemExit:  # --help
            reject()
        assert not os.listdir()

    check()


def test_any_field_of_a_config_file_may_hold_anything(whole, tmp_path):
    plain = json.loads((whole[1] / "config.json").read_text())
    path = tmp_path / "config.json"

    def use():
        typed, saved = read_flags(["--config", str(path)], "")
        resolve(typed, to_take(saved, "a device"), None, ALONE)

    @each_case
    @given(st.sampled_from(places(plain)), CHANGES, ANYTHING | LARGE)
    def check(place, change, new):
        write_changed(path, plain, place, change, new)
        is_taken(use)

    path.write_text(json.dumps(plain))
    assert is_taken(use)
    check()
