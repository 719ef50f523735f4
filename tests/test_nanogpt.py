"""Tests ../support/nanogpt.py: other programs' command lines become ours, in one go."""

import re
import shlex

import pytest

import train_gpt2
from config import DEFAULTS, read_flags
from support.ending import UserError
from support.nanogpt import FOREIGN, check_names

README = (  # nanoGPT's command for a laptop
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12"
    " --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
CONFIG = """# a comment
out_dir = 'out-char'
gradient_accumulation_steps = 5 * 8
batch_size = 64
wandb_run_name = 'run' + str(time.time())
learning_rate = 1e-3
min_lr = 1e-4
dataset = 'shakespeare_char'
decay_lr = False
"""


def translated(line: str) -> str:
    with pytest.raises(UserError) as error:
        read_flags(line.split(), train_gpt2.__doc__)
    return str(error.value)


def command_in(message: str) -> dict:
    """The flags of the command that a message names, which must be one of ours."""
    line = re.search("python train_gpt2.py(.*?)(;|$)", message)[1]
    return read_flags(shlex.split(line), train_gpt2.__doc__)


def test_nanogpts_command_line_is_translated_whole():
    typed = command_in(translated(README))
    assert typed == {
        "device": "cpu", "compile": False, "log_every": 1, "seq_len": 64, "n_layer": 4, "n_head": 4,
        "n_embd": 128, "steps": 2000, "dropout": 0.0, "batch_tokens": 768, "eval_tokens": 15360,
    }  # fmt: skip


def test_a_config_file_is_read_and_not_executed(tmp_path):
    (tmp_path / "train_char.py").write_text(CONFIG + "import os; os.remove(__file__)\n")
    typed = command_in(translated(f"{tmp_path}/train_char.py --block_size=32 --batch_size=2"))
    assert typed == {
        "out_dir": "out-char", "learning_rate": 1e-3, "decay_to": 0.1, "schedule": "constant",
        "data_dir": "data/shakespeare_char", "seq_len": 32, "batch_tokens": 40 * 2 * 32,
    }  # fmt: skip
    assert (tmp_path / "train_char.py").exists()


CASES = {  # what was typed: what must be in the answer
    "--bias=False": "the network has biases",
    "--beta2=0.99": "beta2 is 0.95: change it in make_optimizer",
    "--wandb_project=mine --wandb_log=True": "--wandb; the environment variable WANDB_PROJECT",
    "--init_from=resume": "train_gpt2.py --resume",
    "--init-from scratch": "train_gpt2.py;",
    "--dtype float16": "--fp16",
    "--dtype=float32": "--no-bf16",
    "--dtype=bfloat16": "--bf16",
    "--lr 3e-4": "--learning-rate 3e-4",
    "--batch_size 4 --sequence_length 64 --total_batch_size 512": "--seq-len 64 --batch-tokens 512"
    " --micro-batch-size 4",
    "--zzz --max_iters=10": "--zzz --steps 10",
    "--batch_size=x": "no command line of nanoGPT",
    "config/none.py --compile=False": "config/none.py can't be read as a config file",
}


@pytest.mark.parametrize("line", CASES)
def test_what_it_is_called_elsewhere_is_understood(line):
    message = translated(line)
    assert CASES[line] in message and "--no-bias" not in message


def test_our_own_flags_are_no_other_programs():
    assert not FOREIGN & DEFAULTS.keys()
    for line in ("--init-from gpt2-xl", "--prompt dtype", "--steps 5 --no-compile --muon=true"):
        check_names(line.split(), {*DEFAULTS})


def test_switches_take_true_and_false_in_any_case():
    typed = read_flags(["--muon=true", "--compile=False", "--bf16=FALSE", "--prompt=True"], "")
    assert typed == {"muon": True, "compile": False, "bf16": False, "prompt": "True"}
