"""Any field of any file that the programs read may hold anything: they take it or refuse it in one
line, with the exit code that the README promises, and never end in a traceback.

Each case goes through main of the program itself: what can't be written to the file, or would train
for long, is drawn again. FUZZ_CASES=1000 pytest tests/test_fuzz.py -m slow tries so many of each
kind."""

import copy
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from conftest import flags
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import prepare_data
import train_gpt2
from model import GPT, GPTConfig
from support import corpus
from support.checkpoint import checkpoints, digest, read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CASES = int(os.environ.get("FUZZ_CASES", 100))
cases = []  # the command lines of this test that main has had
each_case = settings(
    max_examples=CASES, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**9]
    + [10**19, 10**40, -(2**63), 0.0, -0.0, 0.5, 1e-46, 1e999, -1e999, float("nan"), True, False]
) | st.integers() | st.floats()  # fmt: skip
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "\0", "..", "../../etc/passwd", "/dev/zero", "nan", "gpt2", "bytes", "\x1b[2J", "\n"]
)
ANYTHING = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
TENSORS = st.sampled_from([
    torch.zeros(()), torch.zeros(0), torch.zeros(3), torch.zeros(2, 3), torch.zeros(3, 2).t(),
    torch.zeros(1).expand(1 << 40), torch.zeros(2, dtype=torch.int64), torch.zeros(2).half(),
    torch.zeros(2).to(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.complex64),
    torch.zeros(2, 2).to_sparse(), torch.zeros(4, device="meta"), torch.full((32,), torch.nan),
    torch.nn.Parameter(torch.zeros(32)), torch.full((32,), 3e38), torch.zeros(2, dtype=torch.bool),
])  # fmt: skip


def places(value, path: tuple = ()) -> list[tuple]:
    """The path of value's every field, and of those inside."""
    items = dict(enumerate(value)) if isinstance(value, list) else value
    inner = list(items.items()) if isinstance(items, dict) else []
    return [path] * bool(path) + [p for name, part in inner for p in places(part, (*path, name))]


def changed(value, path: tuple, how: str, new):
    """value with the field at path replaced or removed, or with another one beside it."""
    value = copy.copy(value)
    name, *rest = path
    if rest:
        value[name] = changed(value[name], tuple(rest), how, new)
    elif how == "replaced":
        value[name] = new
    elif how == "removed":
        del value[name]
    elif isinstance(value, list):
        value.append(new)
    else:
        value[str(new)[:20]] = new
    return value


HOW = st.sampled_from(["replaced", "replaced", "replaced", "removed", "added"])


@pytest.fixture(autouse=True)
def counted():
    """All cases reach main."""
    cases.clear()
    yield
    assert len(cases) >= CASES


def run(program, argv: list[str], codes: tuple, capsys):
    """Run main, which may end with one of these codes, and says why in a line or two."""
    before = capsys.readouterr()
    try:
        code = program.main(argv)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code in codes, (code, err, before)
    assert "Traceback" not in err + out and err.count("\n") <= 2, err
    assert (code in (2, 4, 6, 7)) <= err.startswith(program.__name__), err
    assert err.replace("\n", "").isprintable(), err
    cases.append(argv)


@pytest.fixture(scope="module")
def home(data_dir, tmp_path_factory):
    """A folder with data and with a run of two steps that is complete."""
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(data_dir, folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.set_num_threads(1)
        patch.setattr(train_gpt2.device, "matmul_tflops", lambda *_: 1.0)  # a quarter of a second
        assert train_gpt2.main(line()) == 0
        shutil.copytree("run", "whole")
        yield folder


def line(**changes) -> list[str]:
    changes = {"data_dir": "data", "out_dir": "run", "steps": 2, "sample_tokens": 2} | changes
    return flags(warmup_steps=0, micro_batch_size=12, **changes)


def restore(folder: str, whole: str):
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)


def test_any_field_of_a_checkpoint_may_hold_anything(home, capsys):
    [path] = checkpoints(Path("run"))
    plain = read_checkpoint(path)
    everywhere = places(plain)
    most = [p for p in everywhere if len(p) < 3 or p[1] in (0, 1)]

    seals = st.sampled_from(["a fitting digest", "the old digest"])
    modes = ["--sample-only", "--eval-only", "--steps=3", "--steps=2"]
    extras = [["--resume", mode] for mode in modes] + [["--init-from", "run", modes[0]]]
    extras = st.sampled_from([*extras, ["--resume", "--init-from", "run"]])

    @each_case
    @given(st.sampled_from(most), HOW, ANYTHING | TENSORS, seals, extras)
    def check(place, how, new, seal, extra):
        saved = changed(plain, place, how, new)
        if seal == "a fitting digest":
            try:
                saved["digest"] = digest(saved)
            except Exception:  # of what no program would write
                reject()
        try:
            torch.save(saved, path)
        except Exception:
            reject()
        given = line() if "--init-from" not in extra else line(**no_shape)
        run(train_gpt2, [*given, *extra], (0, 2, 4, 7), capsys)
        restore("run", "whole")

    no_shape = dict.fromkeys(("model", "n_layer", "n_head", "n_embd"))
    check()


def test_any_field_of_a_manifest_may_hold_anything(home, capsys):
    path = Path("data/manifest.json")
    whole = path.read_bytes()
    plain = json.loads(whole)

    @each_case
    @given(st.sampled_from(places(plain)), HOW, ANYTHING, st.booleans(), st.booleans())
    def check(place, how, new, seal, verify):
        manifest = changed(plain, place, how, new)
        manifest.pop("crc32", None)
        try:
            if seal:
                manifest["crc32"] = corpus.content_crc32(manifest)
            path.write_text(json.dumps(manifest))
        except (UnicodeEncodeError, ValueError):
            reject()
        if verify:
            run(prepare_data, ["--verify", "--data-dir", "data"], (0, 2), capsys)
        else:
            run(train_gpt2, [*line(), "--resume"], (0, 2, 6), capsys)
            restore("run", "whole")

    check()
    path.write_bytes(whole)


def test_any_word_of_a_shard_or_of_questions_may_be_anything(home, capsys):
    shard = Path("data/train_000000.bin")
    whole = shard.read_bytes()
    Path("plain").mkdir()
    for part in Path("data").glob("*.bin"):  # without a manifest, each header counts
        shutil.copy(part, Path("plain", part.name))
    Path("questions.jsonl").write_text(
        "".join(json.dumps({"question": "a?", "choices": ["b", "cd"], "answer": n % 2}) + "\n"
                for n in range(3)))  # fmt: skip
    assert prepare_data.main(["--multiple-choice", "questions.jsonl", "--data-dir", "asked"]) == 0
    questions = Path("asked/questions.bin").read_bytes()
    words = st.sampled_from([0, 1, 2, 255, 256, 257, 32767, 65535]) | st.integers(0, 65535)

    @each_case
    @given(st.integers(0, 20) | st.integers(0, len(whole) // 2 - 1), words,
           st.integers(0, 24) | st.integers(512, len(questions) // 2 - 1), words,
           st.integers(0, len(questions)), st.sampled_from(["shard", "words", "cut"]))  # fmt: skip
    def check(at, word, question_at, question_word, cut, kind):
        content, asked = bytearray(whole), bytearray(questions)
        if kind == "shard":
            struct.pack_into("<H", content, 2 * at, word)
        elif kind == "words":
            struct.pack_into("<H", asked, 2 * question_at, question_word)
        Path("plain", shard.name).write_bytes(content)
        Path("asked/questions.bin").write_bytes(asked[:cut] if kind == "cut" else asked)
        extra = {} if kind == "shard" else {"hellaswag": "asked/questions.bin"}
        given = line(data_dir="plain", out_dir="new", steps=1, **extra)
        run(train_gpt2, given, (0, 2, 4, 6), capsys)
        shutil.rmtree("new", ignore_errors=True)

    check()


def test_any_field_of_a_config_json_may_hold_anything(home, capsys):
    pytest.importorskip("safetensors")
    Path("config").mkdir()
    argv = ["--init-from", "run", "--export", "hf"]
    assert train_gpt2.main(argv) == 0
    plain = json.loads(Path("hf/config.json").read_text())

    @each_case
    @given(st.sampled_from(places(plain)), HOW, ANYTHING)
    def check(place, how, new):
        try:
            Path("hf/config.json").write_text(json.dumps(changed(plain, place, how, new)))
        except (UnicodeEncodeError, ValueError):
            reject()
        run(
            train_gpt2,
            ["--init-from", "hf", "--sample-only", "--sample-tokens", "1"],
            (0, 2),
            capsys,
        )

    check()


def test_any_field_of_nanogpts_checkpoint_may_hold_anything(home, capsys):
    model = GPT(GPTConfig(40, 8, 1, 2, 8, pad_vocab=False))
    args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "bias": True, "vocab_size": 40,
            "dropout": 0.0}  # fmt: skip
    plain = {"model": dict(model.state_dict()), "model_args": args, "iter_num": 3,
             "best_val_loss": torch.tensor(2.0), "config": {"dataset": "x"}}  # fmt: skip

    @each_case
    @given(st.sampled_from(places(plain)), HOW, ANYTHING | TENSORS)
    def check(place, how, new):
        try:
            torch.save(changed(plain, place, how, new), "ckpt.pt")
        except Exception:
            reject()
        given = ["--init-from", "ckpt.pt", "--sample-only", "--sample-tokens", "1"]
        run(train_gpt2, given, (0, 2), capsys)

    check()


def test_any_flag_may_be_given_anything(home, capsys):
    """What is taken would train for a day: only what is refused goes through main."""
    names = [f.name for f in train_gpt2.fields(train_gpt2.TrainConfig)]
    texts = TEXTS | NUMBERS.map(str) | st.sampled_from(["--", "-", "=", "--=", "1e", "9" * 40])

    @each_case
    @given(st.sampled_from(names), texts, st.sampled_from(names), texts, st.booleans())
    def check(name, text, other, more, joined):
        pairs = [(train_gpt2.spell(name), text), (train_gpt2.spell(other), more)]
        extra = [f"{flag}={value}" if joined else flag for flag, value in pairs]
        extra += [] if joined else [text]
        try:
            train_gpt2.parse_args([*line(out_dir="new"), *extra], "cpu")
            reject()
        except ValueError:
            run(train_gpt2, [*line(out_dir="new"), *extra], (2,), capsys)
        assert not Path("new").exists() and not Path("out").exists()

    check()
