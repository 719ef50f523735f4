"""The flags of train_gpt2.py, each declared once. resolve decides their values."""

import os
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from dataloader import VOCAB_SIZES
from model import SHAPES, ComputeConfig, GPTConfig
from support import nanogpt
from support.cli import (
    PathName,
    check_limits,
    command,
    flag,
    launched,
    parse,
    read_prompt,
    spell,
    typed_as,
)
from support.device import device_name, speed_ups_off
from support.ending import UserError
from support.pretrained import Pretrained
from support.run_folder import start_of

DEVICES = ("auto", "cpu", "cuda", "mps")
SCHEDULES = ("cosine", "constant", "wsd")


@dataclass(frozen=True)
class TrainConfig:
    """The flags of one run. The defaults suit GPT-2 124M, and RECIPES has those of other models.
    The word after a help text says whether a resumed run may change the flag; see cli.OnResume."""

    model: str = flag("gpt2", "recipe (default: gpt2, or nano without a GPU)", "refuse", SHAPES)
    out_dir: PathName = flag("", "folder (default: out/NNN: new, or newest)", "per command")
    resume: bool = flag(False, "continue from the newest good checkpoint, if any", "per command")
    init_from: PathName = flag("", "initial weights: folder, file or name on the hub", "refuse")
    seed: int = flag(1337, "seed of the weights, the data order and samples", "refuse")
    save_every: int = flag(250, "steps between checkpoints; each evaluation saves one too")
    keep: int = flag(2, "newest checkpoints to keep, plus the best", min=1)  # in case of damage
    device: str = flag("auto", "device to train on", "per command", DEVICES)
    max_hours: float = flag(0.0, "save and stop after this many hours; 0: never", "per command")
    deterministic: bool = flag(False, "bit-for-bit repeatable on GPUs too (slower)", "inexact")
    eval_only: bool = flag(False, "evaluate a run or weights without training", "per command")

    data_dir: PathName = flag(
        "", "folder of token shards (default: Python's own source)", group="data"
    )
    shuffle: bool = flag(True, "reorder the sequences in each epoch", "refuse")
    seq_len: int = flag(1024, "tokens per sequence", "refuse", min=1)
    # As in the lecture.
    batch_tokens: int = flag(2**19, "tokens per step, over all ranks (first run: 65536)", min=1)
    # 20 batches, as in build-nanogpt's published curve.
    eval_tokens: int = flag(10_485_760, "validation tokens (fewer without a GPU); 0: none")

    n_layer: int = flag(12, "transformer blocks", "refuse", min=1, group="network")
    n_head: int = flag(12, "attention heads per block", "refuse", min=1)
    n_embd: int = flag(768, "channels of the residual stream", "refuse", min=1)
    dropout: float = flag(0.0, "probability of zeroing an activation", max=0.99)

    # As in the lecture.
    steps: int = flag(50, "steps (gpt2 without --data-dir: up to 240)", min=1, group="optimization")
    # 375 million tokens, as in GPT-3.
    warmup_steps: int = flag(715, "steps of linear warm-up; by default at most steps / 5")
    learning_rate: float = flag(
        6e-4, "peak learning rate (with Muon, the default depends on --n-embd)"
    )
    schedule: str = flag("cosine", "learning rate after the warm-up", "allow", SCHEDULES)
    decay_to: float = flag(0.1, "final rate of cosine and wsd, as a fraction of the peak", max=1)
    decay_share: float = flag(0.2, "wsd: the final decay, as a fraction of the steps", max=1)
    weight_decay: float = flag(0.1, "weight decay of matrices and embeddings")
    grad_clip: float = flag(1.0, "clip the gradient to this norm; 0: off")
    beta1: float = flag(
        0.9, "AdamW's beta1 (default: 0.9; 0.8 with --muon); beta2 is 0.95", max=0.999
    )
    muon: bool = flag(True, "Muon for the matrices of new weights; --no-muon: AdamW", "refuse")

    eval_every: int = flag(250, "steps between evaluations; 0: only first and last", group="logs")
    log_every: int = flag(0, "steps per printed line; 0: 1/20 of the run")
    hellaswag: PathName = flag("", "JSON-lines file of questions, like HellaSwag's or ARC's")
    wandb: bool = flag(False, "also log to Weights & Biases")

    num_samples: int = flag(1, "samples at each evaluation; 0: none", group="samples")
    sample_tokens: int = flag(200, "maximum number of tokens per sample", min=1)
    prompt: str = flag("", "text to continue, or FILE:NAME (default: the start of a document)")
    temperature: float = flag(0.8, "sampling temperature; 0: greedy")
    top_k: int = flag(50, "sample from the k likeliest tokens; 0: from all")

    # Those that are True are on unless unavailable or slower: see resolve, and choices.py.
    tf32: bool = flag(True, "1: float32 products on tensor cores", "inexact", group="speed-ups")
    bf16: bool = flag(True, "2: bfloat16 where it is safe (autocast)", "inexact")
    compile: bool = flag(True, "3: torch.compile", "inexact")
    flash: bool = flag(True, "4: attention in one fused kernel", "inexact")
    # A resumed run can't change pad_vocab, which sets tensor sizes in the optimizer's state.
    pad_vocab: bool = flag(True, "5: 50,304 embedding rows, not 50,257", "refuse")
    fused: bool = flag(True, "6: AdamW in one kernel", "inexact")
    # On an H100, bf16_residual makes a compiled step of GPT-2 124M 5% faster.
    bf16_residual: bool = flag(False, "bfloat16 residual stream (default: on GPUs)", "inexact")
    fp16: bool = flag(False, "float16, for GPUs without bfloat16", "inexact")

    micro_batch_size: int = flag(0, "sequences per pass; 0: what fits", "inexact", group="memory")
    recompute: bool = flag(False, "recompute blocks in backward, to save memory", "inexact")
    loss_chunk_tokens: int = flag(0, "compute the loss N tokens at a time; 0: all", "inexact")

    def __post_init__(self):
        """Raise UserError, with a remedy, if flags are out of range or contradict each other."""
        check_limits(TrainConfig, vars(self))
        if 0 < self.warmup_steps >= self.steps:
            cure = f"try --warmup-steps {self.steps // 5}"
            raise UserError(f"--warmup-steps must be below --steps {self.steps}: {cure}")
        try:
            self.shape(vocab_size=1)
        except ValueError as error:  # replace field names, such as n_head, with flags
            text = re.sub(r"[a-z]+_[a-z_]+", lambda name: spell(name[0]), str(error))
            raise UserError(text) from error
        if self.prompt.encode(errors="replace").decode() != self.prompt:
            raise UserError("--prompt is not UTF-8 text: type it again")
        if self.bf16 and self.fp16:
            raise UserError("--bf16 and --fp16 conflict: add --no-bf16 or --no-fp16")
        if self.bf16_residual and not self.bf16:
            raise UserError("--bf16-residual needs --bf16: add it, or --no-bf16-residual")

    def shape(self, vocab_size: int) -> GPTConfig:
        """Return the shape of the network. Raise an error if flags and fields don't match."""
        names = [f.name for f in fields(GPTConfig) if f.name != "vocab_size"]
        known = [*names, *(f.name for f in fields(ComputeConfig))]
        group = ""
        for name in known:
            if not hasattr(self, name):
                raise TypeError(f"{name} is no field of TrainConfig, so it has no flag")
        for f in fields(TrainConfig):
            group = f.metadata["group"] or group
            if group == "network" and f.name not in known:
                raise TypeError(f"{f.name} is a field of neither GPTConfig nor ComputeConfig")
        return GPTConfig(vocab_size, **{name: getattr(self, name) for name in names})

    def compute_config(self) -> ComputeConfig:
        return ComputeConfig(**{f.name: getattr(self, f.name) for f in fields(ComputeConfig)})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products (speed-up 2). Weights, sums and the loss stay float32."""
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    def num_micro_batches(self, micro_batch_size: int, num_ranks: int) -> int:
        """Return each rank's number of passes per step. Raise UserError if it is not whole."""
        tokens_per_pass = micro_batch_size * self.seq_len * num_ranks
        count, remainder = divmod(self.batch_tokens, tokens_per_pass)
        if remainder:
            text = f"--batch-tokens {self.batch_tokens} is not a multiple of {tokens_per_pass}"
            text += f" = --micro-batch-size {micro_batch_size} * --seq-len {self.seq_len}"
            cure = f"try --batch-tokens {max(1, count) * tokens_per_pass}"
            raise UserError(f"{text} * {num_ranks} ranks: {cure}")
        return count


DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}

# Learning rates and batch sizes are those of GPT-3 models of similar size (Brown et al. 2020, table
# 2.1). Those of nano were chosen by its validation loss in the time of 700 steps.
RECIPES: dict[str, dict] = {
    "gpt2": {},
    "gpt2-medium": {"learning_rate": 3e-4},
    "gpt2-large": {"learning_rate": 2.5e-4},
    "gpt2-xl": {"learning_rate": 2e-4, "batch_tokens": 1_048_576},
    "nano": {"learning_rate": 4e-3, "batch_tokens": 2048, "steps": 700, "warmup_steps": 50},
}
RECIPES["nano"] |= {"schedule": "wsd", "decay_share": 0.8, "decay_to": 0.0}
RECIPES["nano"] |= {"eval_every": 350, "eval_tokens": 262_144}
for _model, _recipe in RECIPES.items():
    for _name in ("seq_len", "n_layer", "n_head", "n_embd"):
        _recipe[_name] = getattr(SHAPES[_model], _name)

# For --init-from: trained weights need a small rate and batch. nanoGPT finetunes with these.
FINETUNE = {"learning_rate": 3e-5, "batch_tokens": 32_768, "muon": False}
FINETUNE_NANO = {"learning_rate": 1e-3, "muon": False}  # measured: benchmarks/README.md

# For models larger than nano without --data-dir: half a minute on an H100. choices.py
# takes fewer steps on a slow device.
FIRST_RUN = {"batch_tokens": 65_536, "steps": 240}


def finetune_flags(model: str, seq_len: int) -> dict:
    """Return the flags with which weights of about this model's size are trained further."""
    if model != "nano":
        return FINETUNE
    # The weights may have longer sequences than nano's batch.
    return FINETUNE_NANO | {"batch_tokens": max(RECIPES["nano"]["batch_tokens"], seq_len)}


def muon_learning_rate(n_embd: int) -> float:
    """Return --muon's peak learning rate, measured at widths 128 to 512 (benchmarks/README.md)."""
    return float(f"{8e-3 * min(1, 128 / n_embd) ** 0.8:.2g}")  # the measurements justify two digits


SYNONYMS = {  # support/nanogpt.py knows the flags of other programs
    "--cosine": "--schedule cosine",
    "--input": "a flag of prepare_data.py: prepare the text first",
    "--max-new-tokens": "--sample-tokens",
    "--no-cosine": "--schedule constant",
    "--sample-only": "a program, sample.py: python sample.py RUN --prompt TEXT",
    "--start": "--prompt",
    "--tokenizer": "a flag of prepare_data.py: the data determines it",
}

# The flags that --eval-only accepts. It refuses all others, since they would have no effect.
EVAL_FLAGS = "eval_only resume out_dir init_from device data_dir seq_len eval_tokens hellaswag"
EVAL_FLAGS += " deterministic tf32 bf16 fp16 flash bf16_residual loss_chunk_tokens"


def read_flags(argv: list[str], doc: str) -> dict:
    """Return the flags that the user typed, by name. doc is the text around the flags in --help."""
    nanogpt.check_names(argv, {*DEFAULTS}, {*EVAL_FLAGS.split()})
    finetune = {"--init-from": FINETUNE, "nano with --init-from": FINETUNE_NANO}
    typed = parse(TrainConfig, doc, RECIPES | finetune, SYNONYMS, argv)
    if "prompt" in typed:
        typed["prompt"] = read_prompt(typed["prompt"])
    for name in ("data_dir", "out_dir", "init_from", "hellaswag"):
        if typed.get(name) == "":  # from an unset shell variable, for example
            raise UserError(f"{spell(name)} is empty: give it a value, or leave it out")
    num_prompts = sum(arg == "--prompt" or arg.startswith("--prompt=") for arg in argv)
    if num_prompts > 1:  # other flags may repeat, so that scripts can append "$@"
        raise UserError(f"--prompt was given {num_prompts} times: give it once")
    if typed.get("max_hours") and (os.environ.get("TORCHELASTIC_MAX_RESTARTS") or "0") != "0":
        raise UserError("--max-hours: torchrun would start the run again: omit --max-restarts")
    for name in typed:
        if typed.get("eval_only") and name not in EVAL_FLAGS.split():
            raise UserError(f"--eval-only does not use {spell(name)}: leave it out")
    return typed


def resolve(
    typed: dict, state: dict | None, pretrained: Pretrained | None, device: torch.device
) -> tuple[TrainConfig, dict[str, str]]:
    """Return the run's flags, and the reasons for those that depend on this machine. Each value
    comes from the first layer that has one: the command line; a resumed run's checkpoint (state);
    the rules below, which depend on other flags; the starting weights (pretrained); the recipe; or
    the defaults. Raise UserError if the command line or checkpoint can't be honored."""
    asked = asked_flags(typed, state, device)
    weights = flags_of_weights(pretrained, asked) if pretrained else {}
    has_gpu = device.type == "cuda"
    model, reasons = choose_model(asked.get("model") or weights.get("model"), has_gpu)
    rules: dict = {}  # filled below; `flags` reads it, so the order of the rules matters
    flags = ChainMap(*asked.maps, rules, weights, {"model": model}, RECIPES[model], DEFAULTS)

    off = speed_ups_off(device, model, asked)
    reasons |= {f"--no-{name}": f"{name} {reason}" for name, reason in off.items()}
    rules |= dict.fromkeys(off, False)
    if has_gpu and "bf16" in off and "fp16" not in asked:
        rules["fp16"] = True
        reasons["--fp16"] = "instead of bfloat16"
    if asked.get("fp16"):
        rules["bf16"] = False
    if device.type == "cpu":  # choices.py measures whether they are faster
        rules |= {"bf16": bool(asked.get("bf16_residual")), "compile": False}
    if flags["init_from"]:
        rules |= finetune_flags(model, flags["seq_len"])
    elif not flags["data_dir"]:
        rules["prompt"] = "def "  # the data is Python's standard library
        rules |= FIRST_RUN if model != "nano" else {}
    # Muon's products take 300 * n_layer * n_embd**3 FLOPs a step, however many tokens it has: for
    # GPT-2 124M, half as many as those of 4,400 tokens.
    fewest = 6 * flags["n_embd"] if model != "nano" else 0  # nano is quick with either
    if flags["batch_tokens"] < fewest and flags["muon"] and "muon" not in asked:
        rules["muon"] = False
        reasons["--no-muon"] = f"below {fewest} tokens, Muon needs more than a third of a step"
    if flags["muon"]:
        # With Muon, AdamW trains only embeddings and vectors, for which beta1 = 0.8 beat 0.9.
        rules["beta1"] = 0.8
        if not flags["init_from"]:
            rules["learning_rate"] = muon_learning_rate(flags["n_embd"])
    # A warm-up of 715 steps would fill most of a short run. The lecture warms up for a fifth of it.
    rules["warmup_steps"] = min(flags["warmup_steps"], flags["steps"] // 5)
    if not has_gpu and model != "nano" and "eval_tokens" not in asked:
        # With 124M, 8192 tokens take half a minute on a CPU, and all of them would take hours.
        size = flags["n_embd"] * (12 * flags["n_layer"] * flags["n_embd"] + VOCAB_SIZES["gpt2"])
        rules["eval_tokens"] = 8192 * max(1, 124_000_000 // size)
        reasons[f"--eval-tokens {rules['eval_tokens']}"] = "more would take long without a GPU"
    # Not with --init-from: float32 training can yield values to which bfloat16 adds inaccurately.
    if has_gpu and model != "nano" and flags["bf16"] and not flags["init_from"]:
        rules["bf16_residual"] = True
    elif "bf16_residual" not in asked:
        reasons["--no-bf16-residual"] = "it is for new networks larger than nano, on GPUs"
    return TrainConfig(**flags), reasons


def choose_model(wanted: str | None, has_gpu: bool) -> tuple[str, dict[str, str]]:
    """Return the model and, if nobody wants a certain one, the reason for it."""
    if wanted:
        return wanted, {}
    if has_gpu:
        return "gpt2", {"--model gpt2": "there is a GPU"}
    return "nano", {"--model nano": "the larger models would take long on this device"}


def asked_flags(typed: dict, state: dict | None, device: torch.device) -> ChainMap:
    """Return the flags that the user typed, or typed when the resumed run began."""
    return ChainMap(typed, saved_flags(state, device) if state else {})


def has_moved(state: dict, device: torch.device) -> bool:
    """Return whether a checkpoint was written on a different kind of device."""
    return state["environment"]["device_name"] != device_name(device)


def saved_flags(state: dict, device: torch.device) -> dict:
    """Return the flags that a resumed run keeps. On a different kind of device, these exclude the
    speed-ups and micro-batch size. A damaged log.jsonl must not change a run, so it is not read."""
    dropped = {f.name for f in fields(TrainConfig) if f.metadata["on_resume"] == "per command"}
    if has_moved(state, device):
        dropped |= {"tf32", "bf16", "compile", "flash", "fused", "bf16_residual", "fp16"}
        dropped.add("micro_batch_size")
    return {name: state["config"].get(name, DEFAULTS[name]) for name in DEFAULTS.keys() - dropped}


def new_run_cure(flags: dict, run: Path, saved: Mapping, without: tuple[str, ...] = ()) -> str:
    """Return the cure for flags that contradict a run or weights: the command of a new run with
    them, and with those that were typed for `run` so far, in the values that it has saved."""
    typed = ["data_dir", *sorted(start_of(run)[0] & DEFAULTS.keys())] if saved else []
    before = {name: saved[name] for name in typed if saved.get(name) not in (None, "")}
    dropped = {"resume", "out_dir", "max_hours", *without}
    if flags.get("eval_only"):  # evaluate_only has added compile
        flags = {name: flags[name] for name in flags if name not in ("eval_only", "compile")}
    words = [typed_as(*flag) for flag in (before | flags).items() if flag[0] not in dropped]
    line = " ".join([command("train_gpt2.py"), *words, "--out-dir ANOTHER"])
    return f"begin a new run: {launched(line)}"


def flags_of_weights(pretrained: Pretrained, asked: ChainMap) -> dict:
    """Return the flags that the weights determine. Raise UserError if `asked` contradicts them."""
    shape = asdict(pretrained.shape)
    del shape["vocab_size"], shape["pad_vocab"]
    for name, value in shape.items():
        wanted = asked.get(name, value)
        if wanted > value or (wanted < value and name != "seq_len"):  # positions may go unused
            has = f"{pretrained.path} has {typed_as(name, value)}"
            typed, saved = asked.maps
            flags = {**typed, name: wanted}
            cure = new_run_cure(flags, pretrained.path.parent, saved, without=("init_from",))
            raise UserError(f"{typed_as(name, wanted)}: {has}: leave it out, or {cure}")
    ratios = {}  # take the recipe of the model whose blocks have the most similar size
    for model, known in SHAPES.items():
        size = shape["n_layer"] * shape["n_embd"] ** 2 / (known.n_layer * known.n_embd**2)
        ratios[model] = max(size, 1 / size)
    return shape | {"model": min(ratios, key=ratios.__getitem__)}
