"""Any field of a file that the programs take from others may hold anything: it is taken, or refused
by an error that main prints in one line, and never ends in a traceback.

FUZZ_CASES=1000 tries so many of each kind."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dataloader import ShardError
from model import GPT, GPTConfig
from support.checkpoint import load_model, save_weights
from support.cli import RunError
from support.tokenizer import train_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
each_case = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "200")),
    suppress_health_check=list(HealthCheck),
    **{"deadline": None, "derandomize": True, "database": None},
)
NUMBERS = st.integers(-3, 300) | st.floats() | st.booleans()
NUMBERS |= st.sampled_from([0.5, 1e999, 65536, 2**31, 2**63, 10**40])
TEXTS = st.text(max_size=20)
TEXTS |= st.sampled_from(["", "\0", "../../etc/passwd", "/dev/zero", "gpt2", "\x1b[2J", "\n"])
ANYTHING = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CHANGES = st.sampled_from(["replaced", "removed", "added"])


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


def check_fields(path: Path, use: Callable):
    """Change each field of a JSON file, and use the file."""
    plain = json.loads(path.read_text())
    everywhere = places(plain)
    some = everywhere[:60] + everywhere[-30:]  # all but most of a vocabulary's bytes
    use()

    @each_case
    @given(st.sampled_from(some), CHANGES, ANYTHING)
    def check(place, change, new):
        try:
            path.write_text(json.dumps(changed(plain, place, change, new)), "utf-8")
        except (UnicodeEncodeError, ValueError):
            reject()
        try:
            use()
        except (RunError, ShardError) as error:
            assert len(str(error)) < 1000

    check()


@pytest.mark.parametrize("name", ["config.json", "vocab.json", "tokenizer_config.json"])
def test_folder(tmp_path, name):
    """What is taken has logits, and encodes and decodes any text."""
    tokenizer = train_tokenizer(["abc abd  xyz " * 30], 270)
    save_weights(tmp_path, GPT(GPTConfig(tokenizer.size, 8, 1, 1, 2)), tokenizer, tokenizer.name)

    def use():
        model, ours = load_model(str(tmp_path))
        for text in ("abc abd", "é\0 <|endoftext|>", "") if ours else ():
            ids = ours.encode(text)
            assert max(ids, default=0) < ours.size <= 1 << 16 and ours.decode(ids) == text
        assert model.logits(torch.zeros(1, 1, dtype=torch.int64)).isfinite().any()

    check_fields(tmp_path / name, use)
