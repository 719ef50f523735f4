"""Tests ../support/tokenizer.py: Hugging Face's tools have the tokenizers that we have."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, flags, prepare, records, run, train

import sample
from support import tokenizer
from support.cli import UserError
from support.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    bytes_tokenizer,
    find_tokenizer,
    gpt2_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

ROOT = Path(tokenizer.__file__).parent.parent
GPT2 = pytest.param("gpt2", marks=NEEDS_GPT2)
ANY = pytest.mark.parametrize("name", ["bytes", "bpe", "other", GPT2])
TEXTS = [
    "".join(chr(i) for i in range(0x2100)) + "\ud7ff\ue000\ufeff\uffff\U0001f642\U0010ffff",
    "Hello,  wörld 🙂\n\tx1234 .",
    " a , it 's",
    "",
]


@pytest.fixture
def no_cache(tmp_path, monkeypatch) -> Path:
    """The folder of a cache without GPT-2's vocabulary, on a machine without a network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def trained(vocab_size: int = 400) -> Tokenizer:
    """Return a tokenizer trained on this file and some letters with accents."""
    return train_tokenizer([Path(__file__).read_text(), "aéèü ñandú 東京 " * 20], vocab_size)


def other() -> Tokenizer:
    """Return a tokenizer like that of a GPT-2 in another language: special tokens come first, the
    ids are in no order of merges, and documents end with </s>."""
    ours = trained()
    names = [name for name in ours.vocab if name != END_OF_TEXT]
    random.Random(1).shuffle(names)
    special = ["<s>", "</s>", "<名>"]
    return Tokenizer({name: i for i, name in enumerate(special + names)}, ours.merges, "</s>")


def get(name: str) -> Tokenizer:
    return {"bpe": trained, "other": other, "bytes": bytes_tokenizer, "gpt2": gpt2_tokenizer}[
        name
    ]()


def save(ours: Tokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file, content in ours.files(24).items():
        (folder / file).write_bytes(content)
    return folder


def odd_text(rng: random.Random) -> str:
    """Return up to 30 characters and words of all kinds."""
    kinds = ["the", " the", "'ll", "  ", "\t\n", "123", " def", "é", "\u00a0", "\u2003", "東", "🙂"]
    kinds += ["\0", "\ufeff", "\u0301", "\r\n", "_", "<|endoftext|", "\ufffd", "\U0010ffff", "ñan"]
    parts = [
        rng.choice(kinds) if rng.random() < 0.7 else chr(rng.randrange(0xD800)) for _ in "a" * 30
    ]
    return "".join(parts[: rng.randrange(31)])


@ANY
def test_a_checkpoints_tokenizer_in_transformers_is_ours(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    ours = get(name)
    theirs = transformers.AutoTokenizer.from_pretrained(save(ours, tmp_path))
    assert len(theirs) == ours.size and theirs.model_max_length == 24
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text
    assert theirs.convert_ids_to_tokens(ours.end_of_text) == ours.end
    assert theirs.decode([ours.end_of_text]) == ours.end
    rng = random.Random(0)
    for text in TEXTS + [odd_text(rng) for _ in range(1000)]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
        assert ours.decode(ids) == text
    # An end of text inside a text is ordinary text.
    assert ours.end_of_text not in ours.encode(ours.end)
    if name != "gpt2":  # OpenAI's takes it for the end
        assert theirs(ours.end)["input_ids"] == ours.encode(ours.end)
    ordinary = [i for i, token in enumerate(ours.vocab) if token.isascii() and token[0] != "<"]
    for _ in range(500):  # parts of characters too
        ids = rng.choices(ordinary, k=rng.randint(1, 12))
        content = b"".join(map(ours.token_bytes, ids))
        assert theirs.decode(ids) == content.decode(errors="replace")


@ANY
def test_a_folder_gives_back_the_tokenizer_that_it_holds(tmp_path, name):
    ours = get(name)
    save(ours, tmp_path / "a")
    for again in (read_tokenizer(tmp_path / "a"), find_tokenizer(tmp_path / "a", ours.name)):
        assert (again.name, again.sha256) == (ours.name, ours.sha256)
        assert again.files(24) == ours.files(24)
    assert read_tokenizer(tmp_path) is None


@ANY
def test_a_tokenizer_json_alone_is_the_same_tokenizer(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    ours = get(name)
    theirs = transformers.AutoTokenizer.from_pretrained(save(ours, tmp_path / "a"))
    theirs.save_pretrained(tmp_path / "b")
    if (tmp_path / "b/merges.txt").exists():
        (tmp_path / "b/vocab.json").unlink()
        (tmp_path / "b/merges.txt").unlink()
    again = read_tokenizer(tmp_path / "b")
    assert (again.sha256, again.end) == (ours.sha256, ours.end)


WRONG = {
    "words": {"vocab.json": {"a": 0, END_OF_TEXT: 1}, "merges.txt": ""},
    "sentence pieces": {"vocab.json": {"▁the": 0}, "merges.txt": "▁t he"},
    "no end": {"vocab.json": {c: i for i, c in enumerate(tokenizer.ALPHABET)}, "merges.txt": ""},
    "a merge of nothing": {"vocab.json": bytes_tokenizer().vocab, "merges.txt": "a b"},
    "two with one id": {"vocab.json": bytes_tokenizer().vocab | {"a": 98}, "merges.txt": ""},
    "too many": {"vocab.json": {"a": 65536, END_OF_TEXT: 1}, "merges.txt": ""},
    "below zero": {"vocab.json": {"a": -1, END_OF_TEXT: 1}, "merges.txt": ""},
    "a list": {"vocab.json": [1, 2], "merges.txt": ""},
    "WordPiece": {"tokenizer.json": {"model": {"type": "WordPiece", "vocab": {}}}},
    "no model": {"tokenizer.json": {"model": None}},
    "another split": {
        "tokenizer.json": {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence"}}
    },
    "lower case": {
        "tokenizer.json": {
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            "pre_tokenizer": {"type": "ByteLevel"},
            "normalizer": {"type": "Lowercase"},
        }
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tokenizer_of_another_kind_is_refused_by_name(case, tmp_path):
    for name, content in WRONG[case].items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"in {tmp_path} is not a byte-level BPE"):
        read_tokenizer(tmp_path)


@pytest.mark.slow
def test_training_gives_the_same_tokenizer_each_time():
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}; import test_tokenizer"
    code += "; print(test_tokenizer.trained(1000).sha256)"
    digests = {trained(1000).sha256}
    for threads in ("1", "3"):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert trained(300).size == 300 and trained(300).sha256 != trained(301).sha256


@ANY
def test_a_token_is_as_long_as_its_bytes(name):
    ours = get(name)
    lengths = ours.lengths
    for text in TEXTS:
        ids = np.array(ours.encode(text), int)
        assert lengths[ids].sum() == len(text.encode())
    assert not lengths[[ours.end_of_text, *range(ours.size, 1 << 16)]].any()


def test_a_sample_goes_on_from_the_prompt_and_is_always_the_same(data_dir, tmp_path):
    texts = []
    for name in ("a", "b"):
        out_dir = run(tmp_path, data_dir, name, prompt="abc ", sample_tokens=200)
        texts.append(records(out_dir, "sample")[12])
    assert texts[0] == texts[1] and texts[0].startswith("abc ") and len(texts[0]) > 50


def test_without_its_files_there_is_no_tokenizer(no_cache, tmp_path):
    names = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    no_cache.mkdir()
    for name in names:
        assert gpt2_tokenizer() is find_tokenizer(tmp_path, "gpt2") is None
        (no_cache / name).touch()  # the first alone is not enough
    assert find_tokenizer(tmp_path, "bpe-0123456789ab") is None
    assert find_tokenizer(tmp_path, "bytes").name == "bytes"


def test_who_may_download_gpt2s_and_can_not_is_told_what_to_save(no_cache):
    with pytest.raises(UserError) as error:
        gpt2_tokenizer(may_download=True)
    assert all(word in str(error.value) for word in (*tokenizer.URLS.values(), *tokenizer.URLS))


@NEEDS_GPT2
def test_gpt2s_tokens_are_tiktokens():
    import tiktoken

    ours, theirs = gpt2_tokenizer(), tiktoken.get_encoding("gpt2")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.tokens == [theirs.decode_bytes([token]) for token in range(50257)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bpe", GPT2])
def test_data_and_checkpoints_need_neither_a_cache_nor_a_network(name, tmp_path):
    assert prepare(tmp_path / "data", "--input", __file__, "--tokenizer", name) == 0
    out_dir = run(tmp_path, tmp_path / "data", steps=1, warmup_steps=0)
    env = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    env |= {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "https_proxy": "http://127.0.0.1:9"}
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    resume = flags(data_dir=tmp_path / "data", out_dir=out_dir, steps=2, warmup_steps=0)
    for line in (
        [*ranks, ROOT / "train_gpt2.py", *resume, "--resume"],
        [ROOT / "sample.py", out_dir, "--prompt", "a", "--sample-tokens", "2"],
        [ROOT / "evaluate.py", out_dir],
    ):
        command = [sys.executable, *map(str, line)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout
    assert records(out_dir, "bits_per_byte")[2] and records(out_dir, "sample")[2]
    names = ("vocab.json", "merges.txt", "tokenizer_config.json")
    old, new = out_dir / "step_000001", out_dir / "step_000002"
    assert all((old / name).read_bytes() == (new / name).read_bytes() for name in names)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_model_on_its_own_vocabulary_writes_the_same_text_in_transformers(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    line = ("--input", __file__, "--tokenizer", "bpe", "--vocab-size", "400")
    assert prepare(tmp_path / "data", *line) == 0
    out_dir = run(tmp_path, tmp_path / "data", steps=60, seq_len=64, batch_tokens=1024)
    source = next(out_dir.glob("step_*60"))
    capsys.readouterr()
    greedy = ["--prompt", "def test", "--temperature", "0", "--sample-tokens", "50"]
    assert sample.main([str(source), *greedy]) == 0
    ours = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    prompt = theirs("def test", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=50, do_sample=False)
    assert theirs.decode(ids[0], skip_special_tokens=True) + "\n" == ours
    assert len(ids[0]) > 20


@pytest.mark.parametrize("first", [None, "<none>", {"content": "</s>"}])
def test_the_end_of_text_is_the_first_that_the_vocabulary_has(first, tmp_path):
    theirs = other()
    save(theirs, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": first}))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert read_tokenizer(tmp_path).end_of_text == theirs.end_of_text


@pytest.mark.slow
def test_a_gpt2_of_another_language_keeps_its_tokenizer(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    theirs = other()
    save(theirs, tmp_path / "theirs")
    shape = {"vocab_size": theirs.size + 3, "n_positions": 16, "n_embd": 8, "n_layer": 1}
    config = transformers.GPT2Config(**shape, n_head=2, eos_token_id=theirs.end_of_text)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    flags_ = {"init_from": tmp_path / "theirs", "steps": 3, "model": None, "seq_len": None}
    flags_ |= dict.fromkeys(("n_layer", "n_head", "n_embd"))
    assert prepare(tmp_path / "bytes", "--input", __file__) == 0
    code, _, err = train(flags(data_dir=tmp_path / "bytes", **flags_), tmp_path)
    assert code == 2 and f"knows {theirs.name} tokens, but" in err and "holds bytes" in err
    cure = ("--input", __file__, "--tokenizer", str(tmp_path / "theirs"))
    assert prepare(tmp_path / "data", *cure) == 0
    out_dir = run(tmp_path, tmp_path / "data", **flags_)
    last = next(out_dir.glob("step_*3"))
    assert read_tokenizer(last).sha256 == theirs.sha256
    assert json.loads((last / "config.json").read_text())["eos_token_id"] == 1
    assert transformers.AutoTokenizer.from_pretrained(last).eos_token == "</s>"


def test_the_files_of_another_tokenizer_are_not_taken_for_the_one_that_is_asked_for(tmp_path):
    """Its ids would be other words: the name holds the SHA-256 of what made the shards."""
    save(trained(300), tmp_path)
    name = trained(301).name
    try:
        found = find_tokenizer(tmp_path, name)
    except UserError as error:
        assert name in str(error)
    else:
        assert found is None or found.name == name


def test_half_a_tokenizer_is_none(tmp_path):
    for name, content in bytes_tokenizer().files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "vocab.json").unlink()
    assert read_tokenizer(tmp_path) is None
