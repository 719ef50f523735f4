"""Any field of a file that train_gpt2.py takes from others, and any flag, may hold anything: it is
taken, or refused in one line with exit code 2, and never ends in a traceback.

Each case goes through main. FUZZ_CASES=1000 tries so many of each kind."""

import copy
import json
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import flags
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from test_pretrained import SMALLEST, hf_folder, nanogpt_checkpoint

import sample
import train_gpt2
from config import TrainConfig, read_flags, resolve
from support import checkpoint
from support.cli import spell
from support.ending import UserError
from support.pretrained import hf_config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
each_case = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "200")),
    suppress_health_check=list(HealthCheck),
    **{"deadline": None, "derandomize": True, "database": None},
)
NUMBERS = st.integers() | st.floats() | st.booleans()
NUMBERS |= st.sampled_from([0, 1, -1, 2, 3, 65536, 2**31, 2**63, 10**9, 10**40, 0.5, 1e999])
TEXTS = st.text(max_size=20)
TEXTS |= st.sampled_from(["", "\0", "../../etc/passwd", "/dev/zero", "gpt2", "\x1b[2J", "\n"])
ANYTHING = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CHANGES = st.sampled_from(["replaced", "replaced", "removed", "added"])


def hostile_tensors() -> list[torch.Tensor]:
    """Return tensors that may stand in the place of one of shape (2, 2)."""
    x = torch.eye(2)
    tensors = [x.to(dtype) for dtype in (torch.half, torch.int64, torch.complex64)]
    tensors += [x.to_sparse(), x.to_sparse_csr(), x.to("meta"), x / 0, x + 3e38, x.double() + 1e300]
    tensors += [x[0], x[0, 0], x[:0], x[:1].t(), x[:1, :1].expand(2**30, 2**30), x[None], [[1.0]]]
    tensors += [torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), x.to(torch.float8_e4m3fn)]
    return [*tensors, torch.nn.Parameter(x)]


def places(value, path: tuple = ()) -> list[tuple]:
    """Return the path of each field of value, and of those inside."""
    inner = value.items() if isinstance(value, dict) else ()
    return [path] * bool(path) + [p for name, part in inner for p in places(part, (*path, name))]


def changed(value: dict, path: tuple, change: str, new) -> dict:
    """Return value with the field at path replaced or removed, or another one beside it."""
    value = copy.copy(value)
    name, *rest = path
    if rest:
        value[name] = changed(value[name], tuple(rest), change, new)
    elif change == "removed":
        del value[name]
    else:
        value[name if change == "replaced" else str(new)[:20]] = new
    return value


def check_main(argv: list[str], capsys, codes: tuple = (0, 2), program=train_gpt2):
    capsys.readouterr()
    code = program.main(argv)
    err = re.sub(r"^sample.py: sampling from .*\n", "", capsys.readouterr().err)
    assert code in codes and err.count("\n") == (code == 2), err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", err)


SAMPLE = ["--sample-tokens=1", "--num-samples=1", "--prompt="]


@pytest.mark.parametrize("own", [False, True])
def test_any_field_of_a_config_json_may_hold_anything(tmp_path, capsys, own):
    folder = hf_folder(tmp_path / "hf")
    plain = hf_config(SMALLEST, "unknown")
    if not own:
        del plain["train_gpt2"]

    @each_case
    @given(st.sampled_from(places(plain)), CHANGES, ANYTHING)
    def check(place, change, new):
        try:
            (folder / "config.json").write_text(json.dumps(changed(plain, place, change, new)))
        except (UnicodeEncodeError, ValueError):
            reject()
        check_main([str(folder), *SAMPLE], capsys, program=sample)

    check()


def test_any_field_of_nanogpts_checkpoint_may_hold_anything(tmp_path, capsys):
    argv = [str(tmp_path / "ckpt.pt"), *SAMPLE]
    for tensor in hostile_tensors():
        torch.save(nanogpt_checkpoint(SMALLEST, wpe=tensor)[1], tmp_path / "ckpt.pt")
        check_main(argv, capsys, program=sample)
    plain = nanogpt_checkpoint(SMALLEST)[1]

    @each_case
    @given(st.sampled_from(places(plain)), CHANGES, ANYTHING | st.sampled_from(hostile_tensors()))
    def check(place, change, new):
        try:
            torch.save(changed(plain, place, change, new), tmp_path / "ckpt.pt")
        except Exception:
            reject()
        check_main(argv, capsys, program=sample)

    check()


def test_any_field_of_a_state_json_may_hold_anything(whole, tmp_path, monkeypatch, capsys):
    """Where its digest fits. A resume that takes it is not made: the run is complete."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole[1], "run")
    path = Path("run/step_000012")
    plain = json.loads((path / "state.json").read_bytes())

    @each_case
    @given(st.sampled_from(places(plain)), CHANGES, ANYTHING)
    def check(place, change, new):
        try:
            (path / "state.json").write_text(json.dumps(changed(plain, place, change, new)))
        except (UnicodeEncodeError, ValueError):
            reject()
        monkeypatch.setattr(checkpoint, "verify", lambda *_: None)
        check_main(["--out-dir", "run", "--resume", "--steps", "12"], capsys)
        check_main(["--out-dir", "run", "--eval-only"], capsys)

    check()


def test_any_flag_may_be_given_anything(data_dir, tmp_path, monkeypatch, capsys):
    """What is taken would train for a day: only what is refused goes through main."""
    monkeypatch.chdir(tmp_path)
    names = st.sampled_from([spell(f.name) for f in fields(TrainConfig)])
    texts = TEXTS | NUMBERS.map(str) | st.sampled_from(["--", "-", "=", "1e", "9" * 40])
    texts = texts.filter(lambda text: "\0" not in text)  # no argument of a program holds one

    @each_case
    @given(names, texts, names, texts, st.booleans())
    def check(name, text, other, more, joined):
        pairs = [[f"{name}={text}", f"{other}={more}"], [name, text, other, more]]
        line = [*flags(data_dir=data_dir, out_dir="new"), *pairs[not joined]]
        try:
            resolve(read_flags(line, ""), None, None, torch.device("cpu"))
            reject()
        except UserError:
            check_main(line, capsys, (2,))
        except SystemExit:  # --help
            reject()
        assert not os.listdir()

    check()
