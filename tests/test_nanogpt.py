"""Tests ../support/nanogpt.py: other programs' command lines become ours, in one go."""

import os
import re
import shlex
from pathlib import Path

import pytest

import sample
import train_gpt2
from config import DEFAULTS, read_flags
from support.ending import UserError
from support.files import FolderLock
from support.nanogpt import FOREIGN, check_names
from support.pretrained import read_weights
from support.run_folder import check_nothing_is_meant

LAPTOP = (  # nanoGPT's command for a laptop, behind its config file
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12"
    " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
CONFIG = """# a comment
out_dir = 'out-char'
eval_interval = 5 * 50
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
wandb_run_name = 'run' + str(time.time())
beta2 = 0.99
learning_rate = 1e-3
min_lr = 1e-4
dataset = 'shakespeare_char'
text = 'a' * 'b'
"""


def translated(line: str) -> str:
    with pytest.raises(UserError) as error:
        read_flags(line.split(), train_gpt2.__doc__)
    return str(error.value)


def command_in(message: str) -> dict:
    """The flags of the command that a message ends with, which must be one of ours."""
    line = message.partition("train_gpt2.py ")[2]
    return read_flags(shlex.split(line), train_gpt2.__doc__)


def test_nanogpts_command_line_is_translated_whole_and_its_config_not_executed(tmp_path):
    (tmp_path / "train_char.py").write_text(CONFIG + "import os; os.remove(__file__)\n")
    message = translated(f"{tmp_path}/train_char.py {LAPTOP}")
    assert command_in(message) == {
        "model": "gpt2", "muon": False, "device": "cpu", "compile": False, "out_dir": "out-char",
        "eval_every": 250, "log_every": 1, "seq_len": 64, "n_layer": 4, "n_head": 4, "n_embd": 128,
        "steps": 2000, "dropout": 0.0, "batch_tokens": 768, "eval_tokens": 15360, "decay_to": 0.1,
        "learning_rate": 1e-3, "data_dir": "data/shakespeare_char",
    }  # fmt: skip
    longer = translated(f"{tmp_path}/train_char.py {LAPTOP} --max_iters=5000")
    assert command_in(longer)["warmup_steps"] == 2000
    assert "beta2 is 0.95, in make_optimizer" in message and "rate decays" not in message
    assert "the network has biases" in message  # nanoGPT's default has none
    assert (tmp_path / "train_char.py").exists()


def test_a_config_file_for_an_evaluation_names_what_an_evaluation_takes(tmp_path):
    (tmp_path / "eval.py").write_text("batch_size = 8\neval_iters = 500\nwandb_log = False\n")
    line = f"{tmp_path}/eval.py --eval_only=True --init_from=gpt2-xl"
    typed = command_in(translated(line))
    wanted = {"eval_only": True, "init_from": "gpt2-xl", "eval_tokens": 500 * 8 * 1024}
    assert typed == wanted | {"data_dir": "data/openwebtext"}  # nanoGPT's default
    (tmp_path / "ours.py").write_text("n_layer = 4\n")
    assert command_in(translated(f"{tmp_path}/ours.py --steps 9")) == {"n_layer": 4, "steps": 9}


def test_a_micro_batch_that_nobody_typed_is_left_to_what_fits():
    """nanoGPT's 12 sequences of 1,024 tokens do not divide llm.c's batch."""
    typed = command_in(translated("--total_batch_size=524288 --num_iterations=9"))
    assert typed == {"batch_tokens": 524288, "steps": 9}


CASES = {  # what was typed: what must be in the answer
    "--bias=False": "the network has biases, like OpenAI's",
    "--beta2=0.99": "beta2 is 0.95, in make_optimizer",
    "--wandb_project=mine --wandb_log=True": "WANDB_PROJECT=mine",
    "--init_from=resume": "train_gpt2.py --resume",
    "--init-from scratch": "train_gpt2.py",
    "--dtype float16": "--fp16",
    "--dtype=float32": "--no-bf16",
    "--dtype=bfloat16": "--bf16",
    "--lr 3e-4": "--learning-rate 3e-4",
    "--lr=1e-3 --min_lr=1e-4": "--learning-rate 1e-3 --decay-to 0.1",
    "--batch_size 4": "train_gpt2.py --micro-batch-size 4",
    "--batch_size=4 --block_size=64": "--batch-tokens 10240",
    "--init_from=ckpt.pt --max_iters=9": "steps begin at 0; name the data",
    "--lr 1 --seq-len 64 --batch-tokens 1024": "--learning-rate 1 --seq-len 64 --batch-tokens 1024",
    "--lr 1 --block_size 64 --batch_tokens 1024": "--seq-len 64 --batch-tokens 1024",
    "--sequence_length 64 --batch_size 4": "--seq-len 64 --micro-batch-size 4",
    "--decay_lr=False": "--schedule constant --warmup-steps 0",
    "--max_iters=60 --warmup_iters=100": "--steps 60 --warmup-steps 59",
    "--max_iters=60 --warmup_iters=99": "nanoGPT's warm-up, 99 steps, does not fit",
    "--max_iters=60 --lr_decay_iters=100": "the rate decays until --steps",
    "--batch_size 4 --sequence_length 64 --total_batch_size 512": "--seq-len 64 --batch-tokens 512"
    " --micro-batch-size 4",
    "--max_iters=60 --eval_iters=2 --block_size=8": "warm-up, 2000 steps, does not fit",
    "--zzz --max_iters=10": "--zzz --steps 10",
    "--max_iters=10 foo": "foo: flags begin with --",
    "--batch_size=x": "not a command line of nanoGPT",
    "--warmup_iters": "--warmup-steps",
    "--warmup_iters=1e3": "not a command line of nanoGPT",
    "--batch_size=inf": "not a command line of nanoGPT",
    f"{'x' * 300}.py --batch_size=12": "is not here",
    f"--init_from=resume --out_dir={'x' * 300}": "--resume",
    "config/none.py --compile=False": "config/none.py is not here: type its path",
}


def test_torchrun_is_translated_too(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    one, other = "--standalone --nproc_per_node=16 ", "[--nnodes=..., as before, on each machine] "
    for num_local, launcher in (("16", one), ("8", other), ("0", other)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_local)
        message = translated("--max_iters=60 --batch_size=4")
        assert f"command here: torchrun {launcher}" in message


def test_a_single_slip_has_no_remarks_on_whole_command_lines():
    for line in (
        "--model gpt2 --steps 10 --wandb_log=True",
        "--model gpt2 --max_iters=5 --lr 1",
        "--warmup_iters 100 --steps 500 --model gpt2",
        "--num_iterations=9 --sequence_length=8 --total_batch_size=8 --data-dir data",  # llm.c's
    ):
        message = translated(line)
        assert not any(word in message for word in ("warm-up", "biases", "the data is")), message


def test_a_config_file_elsewhere_has_its_data_beside_it(tmp_path):
    config = tmp_path / "nanoGPT/config/train_char.py"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG)
    line = str(config)
    assert command_in(translated(line))["data_dir"] == "data/shakespeare_char"
    data = config.parent.parent / "data/shakespeare_char"
    data.mkdir(parents=True)
    assert command_in(translated(line))["data_dir"] == str(data)
    assert command_in(translated(f"{line} --data-dir mine"))["data_dir"] == "mine"


@pytest.mark.parametrize("line", CASES)
def test_what_it_is_called_elsewhere_is_understood(line):
    message = translated(line)
    assert CASES[line] in message and "--no-bias" not in message


def test_a_resume_of_nanogpts_own_run_begins_with_its_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("theirs")
    assert "--out-dir theirs --resume" in translated("--init_from=resume --out_dir=theirs")
    Path("theirs", "ckpt.pt").touch()
    path = os.path.join("theirs", "ckpt.pt")
    line = "--init_from=resume --out_dir=theirs"
    assert f"train_gpt2.py --init-from {path}" in translated(line)
    whole = command_in(translated(f"{line} --max_iters=9 --batch_size=2 --block_size=8"))
    assert (whole["schedule"], whole["decay_to"]) == ("cosine", 0.1)  # nano's recipe has others
    os.mkdir("theirs/step_000003")  # a run of ours beside it
    assert "--out-dir theirs --resume" in translated(line)
    os.rmdir("theirs/step_000003")
    with pytest.raises(UserError, match=f"ckpt.pt: .* --init-from {re.escape(path)} and another"):
        check_nothing_is_meant(FolderLock(Path("theirs")), {})
    Path("theirs", "log.jsonl").touch()  # a run of ours that was killed early
    check_nothing_is_meant(FolderLock(Path("theirs")), {})
    with pytest.raises(UserError, match=f"holds no GPT-2, .*: name {re.escape(path)}"):
        read_weights(Path("theirs"))


def test_our_own_flags_are_no_other_programs():
    assert not FOREIGN & DEFAULTS.keys()
    for line in ("--init-from gpt2-xl", "--prompt FILE:a.py", "--steps 5 --no-compile --muon=true"):
        check_names(line.split(), {*DEFAULTS}, {*DEFAULTS})


def test_switches_take_true_and_false_in_any_case():
    typed = read_flags(["--muon=true", "--compile=False", "--bf16=FALSE", "--prompt=True"], "")
    assert typed == {"muon": True, "compile": False, "bf16": False, "prompt": "True"}


SAMPLES = {  # what nanoGPT's sample.py takes: the same in ours
    "--out_dir=out-char --device=cpu": {"model": "out-char", "device": "cpu"},
    "--init_from=resume --out_dir=a --dtype=float32 --compile=False": {"model": "a"},
    "--init_from=gpt2-xl --start=What --num_samples=5 --max_new_tokens=9": {
        "model": "gpt2-xl", "prompt": "What", "num_samples": 5, "sample_tokens": 9,
    },
    "--start= --out_dir=a": {"model": "a", "prompt": ""},
    "--out_dir=theirs": {"model": os.path.join("theirs", "ckpt.pt")},
    "out/a --start x": {"model": "out/a", "prompt": "x"},
}  # fmt: skip


@pytest.mark.parametrize("line", SAMPLES)
def test_sample_py_takes_nanogpts_flags(line, tmp_path, monkeypatch):
    """Its --out_dir holds ckpt.pt, unless a run of ours is there, too."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "out-char", "theirs"):
        os.mkdir(name)
    Path("theirs", "ckpt.pt").touch()
    assert sample.read_flags(line.split()) == SAMPLES[line]
