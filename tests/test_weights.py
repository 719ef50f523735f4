"""Tests ../support/weights.py."""

import dataclasses
import json
import math
import os
import pickle
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import each_flipped
from test_model import TINY, generate, hugging_face, tokens
from torch.testing import assert_close

import train_gpt2
from model import GPT, SHAPES, GPTConfig
from support import checkpoint
from support.export import hf_config, hf_weights
from support.weights import HF_SHAPE, Source, read_source


def read(path: Path) -> Source:
    return read_source(str(path), lambda why: None)


def random_gpt(config: GPTConfig):
    """Hugging Face's, with every parameter off its initial 0 and 1."""
    oracle = hugging_face(config).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.add_(torch.randn(p.shape), alpha=0.05)
    return oracle


def loaded(path: Path, **changes) -> GPT:
    source = read(path)
    config = dataclasses.replace(source.shape, **changes)
    model = GPT(config)
    model.load_state_dict(source.weights(config))
    return model.eval()


def small(name: str) -> GPTConfig:
    return dataclasses.replace(SHAPES[name], n_layer=2, vocab_size=997, seq_len=32)


@pytest.mark.parametrize(("name", "shard_size"), [
    ("gpt2", "3MB"), *((name, "1GB") for name in SHAPES if name != "nano")
])  # fmt: skip
def test_a_folder_of_hugging_faces_loads_and_goes_back_bit_for_bit(tmp_path, name, shard_size):
    oracle = random_gpt(small(name))
    oracle.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "3MB")
    model, idx = loaded(tmp_path), tokens(2, 32, vocab_size=997)
    assert model.config == small(name)
    logits = oracle(idx).logits
    error = (model.logits(idx)[..., :997] - logits).abs().max()
    assert error <= 1e-5 * logits.abs().max()
    back = hf_weights(model)
    theirs = {n: p for n, p in oracle.state_dict().items() if n != "lm_head.weight"}
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in back)


@pytest.mark.slow
def test_the_whole_124m_goes_to_hugging_face_and_back_bit_for_bit(tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    oracle = random_gpt(SHAPES["gpt2"])
    oracle.save_pretrained(tmp_path / "theirs")
    model = loaded(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_file(hf_weights(model), tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    settings = hf_config(model.config, 50256)
    (tmp_path / "ours" / "config.json").write_text(json.dumps(settings))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, p), (_, q) in zip(back.named_parameters(), oracle.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_config_that_goes_out_is_the_one_that_comes_in(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(small("gpt2"), None)))
    torch.save(hf_weights(GPT(small("gpt2"))), tmp_path / "pytorch_model.bin")
    assert read(tmp_path).shape == small("gpt2")


def test_a_model_without_prefix_or_in_a_pickle_file_loads_too(tmp_path):
    oracle = random_gpt(small("gpt2"))
    oracle.transformer.save_pretrained(tmp_path / "plain")  # as OpenAI's gpt2 is published
    oracle.save_pretrained(tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(oracle.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    a, b = (loaded(tmp_path / name).state_dict() for name in ("plain", "bin"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_padding_and_fewer_positions_change_no_loss(tmp_path):
    random_gpt(small("gpt2")).save_pretrained(tmp_path)
    idx, targets = (tokens(2, 16, vocab_size=997, seed=seed) for seed in (0, 1))
    losses = [
        loaded(tmp_path, **changes)(idx, targets)
        for changes in ({}, {"pad_vocab": False}, {"seq_len": 16})
    ]
    for loss in losses[1:]:
        assert_close(loss, losses[0], rtol=1e-6, atol=0)


def nanogpt_checkpoint(model: GPT, bias: bool) -> dict:
    """As nanoGPT saves a compiled model."""
    state = {n: p for n, p in model.state_dict().items() if bias or "bias" not in n}
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # its mask
    state = {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()}
    c = model.config
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "bias": bias}
    args = shape | {"block_size": c.seq_len, "vocab_size": c.vocab_size, "dropout": 0.1}
    return {"model": state, "model_args": args, "iter_num": 5, "best_val_loss": torch.tensor(3.0)}


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_loads(tmp_path, bias):
    model = GPT(dataclasses.replace(TINY, pad_vocab=False)).eval()
    torch.save(nanogpt_checkpoint(model, bias), tmp_path / "ckpt.pt")
    idx = tokens(2, 16)
    same = loaded(tmp_path / "ckpt.pt", pad_vocab=False).logits(idx)  # fresh biases are 0
    assert torch.equal(same, model.logits(idx))


def test_a_checkpoint_of_build_nanogpt_loads_without_its_code(tmp_path):
    """It holds an object of a class that this process must not need."""
    module, name = sys.modules["__main__"], "GPTConfig"
    theirs = dataclasses.make_dataclass(
        name, ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"]
    )
    theirs.__module__ = "__main__"
    setattr(module, name, theirs)
    config = dataclasses.replace(TINY, vocab_size=50304, pad_vocab=False, n_embd=8)
    model = GPT(config)
    saved = {"model": model.state_dict(), "config": theirs(16, 50304, 2, 2, 8), "step": 9}
    torch.save(saved, tmp_path / "model_00009.pt")
    delattr(module, name)
    other = loaded(tmp_path / "model_00009.pt")
    assert other.config == dataclasses.replace(config, vocab_size=50257, pad_vocab=True)
    wte = model.state_dict()["lm_head.weight"][:50257]
    assert torch.equal(other.state_dict()["lm_head.weight"][:50257], wte)


def flip_header(path: Path):
    content = bytearray(path.read_bytes())
    content[20] ^= 0x44
    path.write_bytes(content)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def pickle_with_code(path: Path):
    path.unlink()
    path.with_name("pytorch_model.bin").write_bytes(pickle.dumps(Evil(), protocol=2))


def torch_file_with_code(path: Path):
    path.unlink()
    torch.save({"x": Evil()}, path.with_name("pytorch_model.bin"))


def edit_tensors(path: Path, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(path: Path, **changes):
    path = path.with_name("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BROKEN = {
    "lacks transformer.h.1.attn.c_attn.weight": lambda p: edit_tensors(
        p, lambda t: t.pop("transformer.h.1.attn.c_attn.weight")),
    "transformer.ln_f.bias has the shape (7,), not (32,)": lambda p: edit_tensors(
        p, lambda t: t.update({"transformer.ln_f.bias": torch.zeros(7)})),
    "model.safetensors can't be read": flip_header,
    "model.safetensors can't be read: ": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "pytorch_model.bin can't be read": pickle_with_code,
    "pytorch_model.bin is damaged: it holds more than tensors": torch_file_with_code,
    "has no weights": Path.unlink,
    "activation_function relu is not supported": lambda p: edit_config(
        p, activation_function="relu"),
    "scale_attn_by_inverse_layer_idx True is": lambda p: edit_config(
        p, scale_attn_by_inverse_layer_idx=True),
    "model_type llama is not supported": lambda p: edit_config(p, model_type="llama"),
    "config.json: model_type llama is not supported": lambda p: p.with_name(
        "config.json").write_text('{"model_type": "llama", "vocab_size": 99}'),
    "n_inner 99 is not supported": lambda p: edit_config(p, n_inner=99),
    "is no GPT-2: Expecting property": lambda p: p.with_name("config.json").write_text("{"),
    "config.json holds a list, not": lambda p: p.with_name("config.json").write_text("[]"),
    "is no GPT-2: RecursionError": lambda p: p.with_name("config.json").write_text("[" * 99_999),
    "ln_f.bias holds numbers that are not finite": lambda p: edit_tensors(
        p, lambda t: t["transformer.ln_f.bias"].fill_(torch.nan)),
    "holds transformer.h.1.attn.c_attn.bias, which is not in its shape": lambda p: edit_config(
        p, n_layer=1),
    "wpe.weight has the shape (16, 32), not (8, 32)": lambda p: edit_config(p, n_positions=8),
    "wte.weight has the shape (99, 32), not (98, 32)": lambda p: edit_config(p, vocab_size=98),
    "lacks transformer.h.0.attn.c_attn.bias": lambda p: edit_tensors(
        p, lambda t: [t.pop(name) for name in [*t] if name.endswith("bias")]),
    "pytorch_model.bin is damaged: it holds a Tensor, not parts with names": lambda p: (
        p.unlink(), torch.save(torch.ones(3), p.with_name("pytorch_model.bin"))),
    "holds transformer.0, which is not": lambda p: (
        p.unlink(), torch.save(dict.fromkeys(range(12), 0), p.with_name("pytorch_model.bin"))),
    "it holds 1 tensors for 2 layers": lambda p: (
        p.unlink(), torch.save({"wte.weight": [5]}, p.with_name("pytorch_model.bin"))),
    "n_embd 12.5": lambda p: edit_config(p, n_embd=12.5),
    "config.json is no file": lambda p: p.with_name("config.json").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_one_line_and_runs_no_code(tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    random_gpt(dataclasses.replace(TINY, vocab_size=99)).save_pretrained(folder)
    BROKEN[message](folder / "model.safetensors")
    with pytest.raises((ValueError, OSError)) as error:
        loaded(folder)
    assert message.strip(": ") in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not Path("executed").exists()


def test_a_checkpoint_of_something_else_is_one_line(tmp_path):
    for saved in ({"model": [1], "model_args": {}}, {"model": {}}, [1], torch.ones(3)):
        torch.save(saved, tmp_path / "ckpt.pt")
        with pytest.raises(ValueError, match="ckpt.pt is no GPT-2: ") as error:
            loaded(tmp_path / "ckpt.pt")
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps({"model": 1})])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, content):
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(ValueError, match="not written by torch.save, .*: convert") as error:
        loaded(tmp_path / "ckpt.pt")
    assert len(str(error.value).splitlines()) == 1


def test_cached_greedy_text_is_hugging_faces(tmp_path):
    config = dataclasses.replace(small("gpt2"), seq_len=256, n_embd=96)
    oracle = random_gpt(config)
    oracle.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    for seed in range(8):
        prompt = tokens(1, 5 + seed, vocab_size=997, seed=seed)
        theirs = oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert torch.equal(generate(model, prompt, 200, temperature=0), theirs)


# --------------------------------------------------------------------------------------------------
# Hostile files, through the program's own main: exit 2, one line, at once, nothing left behind

SMALLEST = GPTConfig(vocab_size=3, seq_len=2, n_layer=1, n_head=1, n_embd=2)
HOSTILE = [
    None, True, False, 0, -1, 1, 10**9, 10**30, -(10**30), 2**63, 1e9, 1.5, math.nan, math.inf, "",
    "x", "1", "\0", "a\nb", "../..", "x" * 100_000, [], [1], [[[]]], [10**4000], {}, {"a": 1},
]  # fmt: skip


def hf_folder(folder: Path, config: GPTConfig = SMALLEST) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, None) | {"n_inner": None}))
    save_file(hf_weights(GPT(config)), folder / "model.safetensors")
    return folder


def sample(capsys, source) -> tuple[int, str]:
    """The exit code and the output of a sample from source; a mistake must be one line."""
    line = ["--sample-only", "--sample-tokens=3", "--temperature=0"]
    code = train_gpt2.main(["--init-from", str(source), *line])
    out, err = capsys.readouterr()
    assert code in (0, 2)
    if code:
        assert out == "" and err.startswith("train_gpt2.py: error: --init-from ")
        assert err.count("\n") == 1 and len(err) < 1000
    return code, out


def is_refused(capsys, source, expected: Source) -> bool:
    """Whether the program refuses source; if not, it must be the network that is expected."""
    try:
        found = read(source)
    except ValueError:
        assert sample(capsys, source)[0] == 2
        return True
    assert (found.shape, found.tokenizer) == (expected.shape, expected.tokenizer)
    assert all(torch.equal(found.tensors[name], t) for name, t in expected.tensors.items())
    return False


def walk(value, path=()):
    """Every place in value, a tree of dicts and lists."""
    yield path
    children = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    for key, child in children:
        yield from walk(child, (*path, key))


def changed(tree, path: tuple, value):
    """A copy of tree with value at path."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


def cases(tree) -> list:
    return [(path, changed(tree, path, value), value) for path in walk(tree) for value in HOSTILE]


def test_no_value_in_a_config_json_does_more_than_be_refused(tmp_path, capsys):
    folder = hf_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    expected, num_refused = read(folder), 0
    assert sample(capsys, folder)[0] == 0
    for path, settings, value in cases(config):
        (folder / "config.json").write_text(json.dumps(settings))
        if is_refused(capsys, folder, expected):
            num_refused += 1
        else:
            assert path[0] not in HF_SHAPE.values() or value == config[path[0]], (path, value)
    assert num_refused > 200 and os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("content", [
    b"", b"\xff\xfe{}", b"{", b'{"n_layer": ' + b"9" * 5000 + b"}", b"[" * 200_000, b" " * 2**23,
    b'{"a":' * 100_000, b"\0" * 100,
])  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_no_json_does_more_than_be_refused(tmp_path, capsys, name, content):
    folder = hf_folder(tmp_path / "hf")
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert sample(capsys, folder)[0] == 2


def test_no_value_in_an_index_does_more_than_be_refused(tmp_path, capsys):
    folder, names = hf_folder(tmp_path / "hf"), [*hf_weights(GPT(SMALLEST))][:3]
    expected = read(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    for path, changes, value in [(("metadata",), index, None), *cases(index)]:
        (folder / "model.safetensors.index.json").write_text(json.dumps(changes))
        assert is_refused(capsys, folder, expected) == (path[:1] != ("metadata",)), (path, value)


def with_header(content: bytes, header) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def test_no_header_of_a_safetensors_file_does_more_than_be_refused(tmp_path, capsys):
    folder = hf_folder(tmp_path / "hf")
    path, expected = folder / "model.safetensors", read(folder)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    names = [name for name in header if ".h." not in name]  # the others are alike
    trees = [case for case in cases(header) if not case[0] or case[0][0] in names]
    for place, changes, value in trees:
        path.write_bytes(with_header(whole[start:], changes))
        assert is_refused(capsys, folder, expected) or place[0] == "__metadata__", (place, value)
    for length in (0, 1, 7, start, start - 9, 2**31, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + whole[8:])
        assert sample(capsys, folder)[0] == 2
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert sample(capsys, folder)[0] == 2
    path.write_bytes(whole + b"\0")
    assert sample(capsys, folder)[0] == 2


def hostile_tensors() -> dict:
    """Instead of one of shape (2, 2)."""
    plain = torch.eye(2)
    quantized = torch.quantize_per_tensor(plain, 1.0, 0, torch.qint8)
    numbers = ("int64", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2")
    return {name: plain.to(getattr(torch, name)) for name in numbers} | {
        "sparse": plain.to_sparse(), "csr": plain.to_sparse_csr(), "quantized": quantized,
        "meta": plain.to("meta"), "nan": plain * math.nan, "inf": plain / 0,
        "too large for float32": torch.full((2, 2), 1e300, dtype=torch.float64),
        "0-d": torch.tensor(1.0), "1-d": torch.zeros(2), "3-d": torch.zeros(2, 2, 1),
        "empty": torch.zeros(0, 2), "a row short": torch.zeros(1, 2), "list": [[1.0, 0.0]] * 2,
    }  # fmt: skip


def good_tensors() -> dict:
    """The same tensor in the ways in which it may be stored."""
    plain = torch.eye(2)
    types = (torch.float16, torch.bfloat16, torch.float64)
    return {str(dtype): plain.to(dtype) for dtype in types} | {
        "transposed": plain.t(), "parameter": torch.nn.Parameter(plain),
        "with gradient": plain.clone().requires_grad_(), "a part": torch.eye(4)[:2, :2],
    }  # fmt: skip


def tiny_nanogpt(**tensors) -> dict:
    model = GPT(dataclasses.replace(SMALLEST, pad_vocab=False))
    saved = nanogpt_checkpoint(model, bias=True)
    saved["model"] |= {f"_orig_mod.transformer.{n}.weight": t for n, t in tensors.items()}
    return saved


@pytest.mark.parametrize("kind", ["ckpt.pt", "pytorch_model.bin"])
def test_a_tensor_of_another_kind_is_refused(tmp_path, capsys, kind):
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    source = folder / kind if kind == "ckpt.pt" else folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and quantized tensors are announced
        for name, tensor in hostile_tensors().items():
            saved = tiny_nanogpt(wpe=tensor)
            if kind != "ckpt.pt":
                saved = hf_weights(GPT(SMALLEST)) | {"transformer.wpe.weight": tensor}
            torch.save(saved, folder / kind)
            assert sample(capsys, source)[0] == 2, name
            torch.save(saved, folder / kind, _use_new_zipfile_serialization=False)
            assert sample(capsys, source)[0] == 2, name


@pytest.mark.parametrize("name", good_tensors())
def test_a_tensor_is_taken_in_each_way_in_which_it_may_be_stored(tmp_path, name):
    torch.save(tiny_nanogpt(wpe=good_tensors()[name]), tmp_path / "ckpt.pt")
    found = read(tmp_path / "ckpt.pt").tensors["transformer.wpe.weight"]
    assert torch.equal(found, torch.eye(2)) and found.dtype == torch.float32


def test_a_small_file_takes_no_memory_that_it_only_claims(tmp_path, capsys):
    """16,777,216 rows of one number, and of none."""
    large = dataclasses.replace(SMALLEST, vocab_size=2**24, n_embd=2**10)
    with torch.device("meta"):
        model = GPT(large)
    sizes = {name: p.shape for name, p in model.named_parameters()}
    tensors = {name: torch.zeros(1, dtype=torch.float16).expand(s) for name, s in sizes.items()}
    saved = nanogpt_checkpoint(model, bias=True) | {"model": tensors}
    torch.save(saved, tmp_path / "ckpt.pt")
    assert sample(capsys, tmp_path / "ckpt.pt")[0] == 2
    torch.save(tiny_nanogpt(wpe=torch.zeros(1).expand(2**30, 2**30)), tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="wpe.weight has the shape"):
        read(tmp_path / "ckpt.pt")
    folder = hf_folder(tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(hf_config(large, None)))
    assert sample(capsys, folder)[0] == 2


def test_no_value_in_an_archive_does_more_than_be_refused(tmp_path, capsys):
    path, saved = tmp_path / "ckpt.pt", tiny_nanogpt()
    torch.save(saved, path)
    expected, names, args = read(path), [*saved["model"]], saved["model_args"]
    places = [("model",), ("model_args",), *(("model_args", name) for name in args)]
    places += [("model", name) for name in (names[0], names[-1], names[3])]
    for place in places:
        for value in HOSTILE:
            torch.save(changed(saved, place, value), path)
            free = place[-1] in ("dropout", "bias") or place[-1].endswith("attn.bias")
            free |= place[0] == "model_args" and type(value) is int and value == args.get(place[-1])
            free &= value != [10**4000]  # which PyTorch does not read back
            assert is_refused(capsys, path, expected) != free, (place, value)
    for value in HOSTILE:
        torch.save(value, path)
        assert sample(capsys, path)[0] == 2


def loads(path: Path) -> dict | None:
    """The tensors in path, None if it is refused; in one line."""
    try:
        return read(path).tensors
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
    return None


def flips(path: Path, source: Path, bits: range) -> tuple[int, int]:
    """Of the versions of path with one of these bits flipped, how many load from source with other
    tensors, and how many with the same."""
    expected, differ, equal = loads(source), 0, 0
    for _ in each_flipped(path, bits):
        if (found := loads(source)) is not None:
            same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            equal, differ = equal + same, differ + (not same)
    print(
        f"{path.name}: {len(bits)} flips, {differ} load with other tensors, {equal} with the same"
    )
    return differ, equal


@pytest.mark.parametrize(
    ("first", "stride"),
    [(0, 193), *(pytest.param(bit, 31, marks=pytest.mark.slow) for bit in range(8))],
)
def test_no_flipped_bit_loads_other_tensors(tmp_path, first, stride):
    """But in the numbers of a safetensors file, which has no checksum."""
    path = tmp_path / "ckpt.pt"
    torch.save(tiny_nanogpt(), path)
    assert flips(path, path, range(first, 8 * path.stat().st_size, stride))[0] == 0
    path = hf_folder(tmp_path / "hf") / "model.safetensors"
    end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert flips(path, path.parent, range(first, 8 * end, min(stride, 31)))[0] == 0
    numbers = range(8 * end + first, 8 * path.stat().st_size, stride)
    assert flips(path, path.parent, numbers)[0] > 0


@pytest.mark.parametrize("name", [
    "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
])  # fmt: skip
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "loop", "dangling"])
def test_what_is_no_file_is_refused_at_once(tmp_path, capsys, name, kind):
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / name).unlink(missing_ok=True)
    path = folder / name
    {
        "fifo": lambda: os.mkfifo(path), "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"), "loop": lambda: path.symlink_to(name),
        "dangling": lambda: path.symlink_to("nowhere"),
    }[kind]()  # fmt: skip
    if name == "config.json":
        (tmp_path / "weights").rename(folder / "model.safetensors")
    for source in (folder, path):
        assert sample(capsys, source)[0] == 2


@pytest.mark.parametrize("name", ["\0", "a\0b", "x" * 5000, "a/b/c", "-", " ", "~", "a\nb"])
def test_a_name_of_nothing_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.main([f"--init-from={name}", "--sample-only"]) == 2
    assert re.fullmatch("train_gpt2.py: error: --init-from .*\n", capsys.readouterr().err)
    assert not os.listdir()


def own_checkpoint(path: Path) -> dict:
    """As a run writes it before its first step."""
    shape = dataclasses.replace(SMALLEST, vocab_size=257)
    model = GPT(shape)
    config = dataclasses.asdict(train_gpt2.TrainConfig(model="nano", bf16=False, warmup_steps=1))
    facts = {"tokenizer": "bytes"} | dataclasses.asdict(shape)
    saved = {"step": 0, "position": 0, "val_losses": {}, "scaler": {}}
    saved |= {"model": model.state_dict(), "optimizer": {}, "environment": {}}
    saved |= {"identity": facts, "config": config}
    torch.save(sealed(saved), path)
    return saved


def sealed(saved: dict) -> dict:
    return saved | {"digest": checkpoint.digest(saved)}


def test_no_value_in_a_checkpoint_does_more_than_be_refused(tmp_path, capsys):
    """With a digest that fits: from the file and from its folder."""
    path = tmp_path / "checkpoint_000000.pt"
    saved = own_checkpoint(path)
    expected = read(path)
    assert sample(capsys, path)[0] == sample(capsys, tmp_path)[0] == 0
    places = [(name,) for name in saved] + [("identity", name) for name in saved["identity"]]
    places += [("config", name) for name in ("model", "steps", "learning_rate", "tf32", "prompt")]
    for place in places:
        for value in HOSTILE:
            is_unknown = place[-1] == "tokenizer" and type(value) is str
            torch.save(sealed(changed(saved, place, value)), path)
            if not is_unknown:
                is_refused(capsys, path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("value", [True, -1, 10**30, 1.5, math.nan, "x", []])
def test_no_flag_in_a_checkpoint_does_more_than_be_refused(tmp_path, capsys, value):
    path = tmp_path / "run" / "checkpoint_000000.pt"
    path.parent.mkdir()
    saved = own_checkpoint(path)
    line = ["--resume", "--out-dir", str(path.parent), "--sample-only", "--sample-tokens=2",
            "--num-samples=1"]  # fmt: skip
    for name in saved["config"]:
        torch.save(sealed(changed(saved, ("config", name), value)), path)
        assert train_gpt2.main(line) in (0, 2, 7), name
        assert len(capsys.readouterr().err.splitlines()) <= 2, name


def test_a_digest_keeps_another_number_out(tmp_path, capsys):
    path = tmp_path / "checkpoint_000000.pt"
    saved = own_checkpoint(path)
    saved = sealed(saved)
    saved["model"]["transformer.wpe.weight"][0, 0] += 1
    torch.save(saved, path)
    assert sample(capsys, path)[0] == 2
    assert train_gpt2.main(["--init-from", str(tmp_path), "--sample-only"]) == 2
    assert "none of its checkpoints is good" in capsys.readouterr().err
