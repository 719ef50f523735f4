"""The flags of train_gpt2.py, each declared once. resolve decides their values.

Only functions import torch here, since --help should not take the two seconds of that import."""

import json
import subprocess
import sys
from collections import ChainMap
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dataloader import GPT2_TOKENS, MANIFEST
from support.cli import Parser, UserError, flag, spell

# Layers and channels: Radford et al. 2019, table 2. Heads: OpenAI's released models. Learning rates
# and batch sizes are those of GPT-3 models of similar size (Brown et al. 2020, table 2.1). Those of
# nano were chosen by validation loss after a minute on two cores: deeper networks need longer runs.
# Rates are for AdamW: resolve sets Muon's.
RECIPES: dict[str, dict] = {
    "gpt2": {},  # 124M parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "learning_rate": 3e-4},  # 355M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280, "learning_rate": 2.5e-4},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "learning_rate": 2e-4},  # 1,558M
    "nano": {"n_layer": 2, "n_head": 4, "n_embd": 160, "learning_rate": 4e-3},  # 1.3M
}
RECIPES["gpt2-xl"] |= {"batch_tokens": 2**20}
RECIPES["nano"] |= {"seq_len": 64, "batch_tokens": 2048, "steps": 850, "warmup_steps": 60}
RECIPES["nano"] |= {"schedule": "wsd", "decay_share": 0.8, "decay_to": 0.0}
RECIPES["nano"] |= {"eval_every": 425, "eval_tokens": 262_144}

SCHEDULES = ("cosine", "constant", "wsd")


@dataclass(frozen=True)
class TrainConfig:
    """The flags of one run. The defaults suit GPT-2 124M, and RECIPES has those of other models.
    A resumed run can't change a flag that is `fixed`: it would become another run."""

    model: str = flag("gpt2", "a recipe (default: by device)", fixed=True, choices=RECIPES)
    out_dir: str = flag("", "folder of the run (default: out/NNN, a new one)")
    resume: bool = flag(False, "continue the run in --out-dir")
    auto_resume: bool = flag(False, "continue the run in --out-dir, or begin it if there is none")
    init_from: str = flag("", "initial weights: a folder, a run, or a name on the hub", fixed=True)
    seed: int = flag(1337, "seed of the weights, the data order and samples", fixed=True)
    save_every: int = flag(250, "steps between checkpoints; each evaluation saves one too")
    keep: int = flag(2, "newest checkpoints to keep, plus the best", min=1)  # in case of damage
    device: str = flag("", "cuda, cuda:1, cpu, mps, ... (default: the best)")
    max_hours: float = flag(0.0, "save and stop after this many hours; 0: never")
    deterministic: bool = flag(False, "bit-for-bit repeatable on GPUs too (slower)")

    data_dir: str = flag("", "token shards (default: the run's, or Python's source)", group="data")
    shuffle: bool = flag(True, "reorder the sequences in each epoch", fixed=True)
    seq_len: int = flag(1024, "tokens per sequence", fixed=True, min=1)
    batch_tokens: int = flag(2**19, "tokens per step (default: 524288; first run: 65536)", min=1)
    # 20 batches, as in build-nanogpt's published curve.
    eval_tokens: int = flag(10_485_760, "validation tokens (fewer without a GPU); 0: none")

    n_layer: int = flag(12, "transformer blocks", fixed=True, min=1, group="network")
    n_head: int = flag(12, "attention heads per block", fixed=True, min=1)
    n_embd: int = flag(768, "channels of the residual stream", fixed=True, min=1)
    dropout: float = flag(0.0, "probability of zeroing an activation", max=0.99)

    steps: int = flag(50, "steps (default: 50; first run: 240)", min=1, group="optimization")
    # 375 million tokens, as in GPT-3.
    warmup_steps: int = flag(715, "linear warm-up (default: 715, at most steps / 5)")
    learning_rate: float = flag(6e-4, "peak learning rate (default: by model; Muon's: by width)")
    schedule: str = flag("cosine", "learning rate after the warm-up", choices=SCHEDULES)
    decay_to: float = flag(0.1, "final rate of cosine and wsd, as a fraction of the peak", max=1)
    decay_share: float = flag(0.2, "wsd: the final decay, as a fraction of the steps", max=1)
    weight_decay: float = flag(0.1, "weight decay of matrices and embeddings")
    grad_clip: float = flag(1.0, "clip the gradient to this norm; 0: off")
    beta1: float = flag(0.9, "AdamW's; beta2 is 0.95 (default: 0.9; --muon: 0.8, 0.99)", max=0.999)
    muon: bool = flag(True, "Muon for the matrices of new weights; --no-muon: AdamW", fixed=True)

    eval_every: int = flag(250, "steps between evaluations; 0: only first and last", group="logs")
    log_every: int = flag(0, "steps per printed line; 0: 1/20 of the run")
    hellaswag: str = flag("", "JSON-lines file of questions, like HellaSwag's or ARC's")
    wandb: bool = flag(False, "also log to Weights & Biases, or to trackio")

    num_samples: int = flag(1, "samples per evaluation, or per prompt; 0: none", group="samples")
    sample_tokens: int = flag(200, "maximum number of tokens per sample", min=1)
    prompt: str = flag("", "text to continue (default: none)")
    temperature: float = flag(0.8, "sampling temperature; 0: greedy")
    top_k: int = flag(50, "sample from the k likeliest tokens; 0: from all")

    # A default of True means on, unless the device lacks it. Without a GPU, a measurement decides
    # on --bf16 and --flash.
    tf32: bool = flag(True, "1: float32 products on tensor cores", group="speed-ups")
    bf16: bool = flag(True, "2: bfloat16 where it is safe (autocast)")
    compile: bool = flag(True, "3: torch.compile (default: on GPUs)")
    flash: bool = flag(True, "4: attention in one fused kernel")
    # A resumed run can't change pad_vocab, which sets tensor sizes in the optimizer's state.
    pad_vocab: bool = flag(True, "5: 50,304 embedding rows, not 50,257", fixed=True)
    fused: bool = flag(True, "6: AdamW in one kernel")
    # On an H100, bf16_residual makes a compiled step of GPT-2 124M 5% faster.
    bf16_residual: bool = flag(False, "bfloat16 residual stream (default: on GPUs)")
    fp16: bool = flag(False, "float16, for GPUs without bfloat16")

    micro_batch_size: int = flag(0, "sequences per pass; 0: what fits", group="memory")
    recompute: bool = flag(False, "recompute blocks in backward, to save memory")
    loss_chunk_tokens: int = flag(0, "compute the loss N tokens at a time; 0: all")

    def __post_init__(self):
        """Raise UserError if flags contradict each other."""
        if 0 < self.warmup_steps >= self.steps:
            raise UserError(f"--warmup-steps {self.warmup_steps} is not below --steps {self.steps}")
        if self.n_embd % self.n_head:
            raise UserError(f"--n-head {self.n_head} must divide --n-embd {self.n_embd}")
        if self.bf16 and self.fp16:
            raise UserError("--bf16 and --fp16 conflict: add --no-bf16 or --no-fp16")
        if self.bf16_residual and not self.bf16:
            raise UserError("--bf16-residual needs --bf16: add it, or --no-bf16-residual")

    def fields_of(self, kind: type) -> dict[str, Any]:
        """Return the values of the fields that a class, such as GPTConfig, has in common."""
        names = {f.name for f in fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names}

    @property
    def dtype(self) -> str:
        """The dtype of matrix products (speed-up 2). Weights, sums and the loss stay float32."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    def num_micro_batches(self, num_ranks: int) -> int:
        """Return each rank's micro-batches per step. Raise UserError if they are not whole."""
        B, T = self.micro_batch_size, self.seq_len
        per_pass = B * T * num_ranks
        if self.batch_tokens % per_pass:
            how = f"{per_pass} = --micro-batch-size {B} * --seq-len {T} * {num_ranks} ranks"
            raise UserError(f"--batch-tokens {self.batch_tokens} is not a multiple of {how}")
        return self.batch_tokens // per_pass


DEFAULTS = {f.name: f.default for f in fields(TrainConfig)}
NOT_SAVED = ("out_dir", "resume", "auto_resume", "device", "max_hours")
SPEED_UPS = ("tf32", "bf16", "compile", "flash", "fused", "bf16_residual", "fp16")
# Flags that may change the last bits of a result, but not what is computed.
INEXACT = (*SPEED_UPS, "micro_batch_size", "recompute", "loss_chunk_tokens", "deterministic")

# For --init-from: trained weights need a small rate and batch. nanoGPT finetunes with these.
FINETUNE = {"learning_rate": 3e-5, "batch_tokens": 32_768, "muon": False}
FINETUNE_NANO = {"learning_rate": 1e-3, "muon": False}  # measured: benchmarks/README.md

# For models larger than nano without --data-dir: half a minute on an H100.
FIRST_RUN = {"batch_tokens": 65_536, "steps": 240}


def read_flags(argv: list[str], doc: str) -> tuple[dict, dict]:
    """Return the flags that were typed, by name, and those in the file of --config."""
    for name, recipe in (RECIPES | {"gpt2 --init-from": FINETUNE}).items():
        doc += f"\n--model {name}: {recipe}"
    parser = Parser(TrainConfig, doc)
    parser.add_argument("--config", help="a run's config.json: its flags apply unless typed here")
    typed = parser.parse(argv)
    if not (file := typed.pop("config", "")):
        return typed, {}
    if typed.keys() & {"model", "resume", "auto_resume"}:
        raise UserError("--config is for a new run of its model: leave out --model and --resume")
    try:
        saved = json.loads(Path(file).read_bytes())
        machine = saved.pop("machine", {})
        # Parse them as a command line, so that they are checked like typed flags.
        words = [f"--{name}={value}" for name, value in saved.items()]
        return typed, parser.parse(words) | {"machine": machine}
    except (OSError, ValueError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{file} is not a run's config.json: {error}") from error


def to_save(config: TrainConfig, machine: dict) -> dict:
    """Return what a run's config.json and its checkpoints keep: its flags, and the machine."""
    flags = {name: value for name, value in asdict(config).items() if name not in NOT_SAVED}
    return flags | {"machine": machine}


def to_take(saved: dict, device_name: str) -> dict:
    """Return the saved flags that a run inherits. On another device, speed-ups are not among them:
    they are chosen anew."""
    has_moved = saved.get("machine", {}).get("device", device_name) != device_name
    left_out = ("machine", *NOT_SAVED, *(SPEED_UPS if has_moved else ()))
    return {name: value for name, value in saved.items() if name not in left_out}


def changes(saved: dict, now: dict) -> list[str]:
    """Return a line for each difference from a checkpoint that holds `saved`."""
    before = DEFAULTS | saved | saved["machine"]
    lines = []
    for name, value in (now | now["machine"]).items():
        if name != "machine" and value != before.get(name, value):
            remark = "" if name in now and name not in INEXACT else "; not bit for bit"
            lines.append(f"changed: {name} {value}, was {before[name]}{remark}")
    return lines


def resolve(typed: dict, saved: dict, weights: Any, world: Any) -> TrainConfig:  # noqa: C901
    """Return a run's flags. Each is the typed value, else that `saved` in the --config file or the
    resumed checkpoint, else what the rules below choose for this World's device, the Weights to
    start from, if any, and the model. Raise UserError if flags contradict each other."""
    import torch

    given = saved | typed
    on_gpu = world.device.type == "cuda"
    shape = asdict(weights.shape) if weights else {}
    is_small = shape["n_layer"] * shape["n_embd"] ** 2 < 1e6 if shape else not on_gpu
    model = given.get("model", "nano" if is_small else "gpt2")
    is_nano = model == "nano"
    chosen: dict = {"model": model}  # by the rules
    # The first that has a flag decides. A rule below also sees what those above it have chosen.
    flags = ChainMap(given, chosen, shape, RECIPES[model], DEFAULTS)
    for name, value in shape.items():
        is_shorter = name == "seq_len" and flags[name] < value  # positions may go unused
        if flags[name] != value and name != "pad_vocab" and not is_shorter:
            has = f"{weights.folder} has {spell(name, value)}"
            raise UserError(f"{spell(name, flags[name])}: {has}")

    if not on_gpu:  # on a CPU, device.choose decides about bf16 and flash
        chosen.update(tf32=False, bf16=False, compile=False)
    elif torch.cuda.get_device_capability(world.device) < (8, 0):  # a T4 or V100: no bfloat16
        chosen.update(tf32=False, bf16=False, fp16=True)
    if is_nano or not find_spec("triton"):  # for nano, compiling takes longer than it saves
        chosen["compile"] = False
    if flags["fp16"]:
        chosen["bf16"] = False
    if flags["init_from"] and is_nano:  # the weights may have more positions than its batch
        chosen.update(FINETUNE_NANO, batch_tokens=max(flags["batch_tokens"], flags["seq_len"]))
    elif flags["init_from"]:
        chosen.update(FINETUNE)
    elif not flags["data_dir"]:
        chosen.update({} if is_nano else FIRST_RUN, prompt="def ")
    if not flags["data_dir"]:  # Python's source as tokens of the weights, or of its own
        tokenizer = weights.tokenizer.partition("-")[0] or "gpt2" if weights else "bpe"
        chosen["data_dir"] = f"data/stdlib-{tokenizer}"
    # Muon's matrix products take 300 * n_layer * n_embd**3 FLOPs per step, however many tokens it
    # has. For GPT-2 124M, that is half of what the network takes for 4,400 tokens.
    if not is_nano and flags["batch_tokens"] < 6 * flags["n_embd"]:
        chosen["muon"] = False
    if flags["muon"]:  # then AdamW trains only embeddings and vectors: beta1 = 0.8 beat 0.9
        chosen["beta1"] = 0.8
    if flags["muon"] and not flags["init_from"]:
        # Measured at widths 128 to 512 (benchmarks/README.md), which justifies two digits.
        rate = 8e-3 * min(1, 128 / flags["n_embd"]) ** 0.8
        chosen["learning_rate"] = float(f"{rate:.2g}")
    # A warm-up of 715 steps would fill most of a short run. The lecture warms up for a fifth of it.
    chosen["warmup_steps"] = min(flags["warmup_steps"], flags["steps"] // 5)
    if not on_gpu and not is_nano:
        # With 124M, 8192 tokens take half a minute on a CPU, and all of them would take hours.
        size = flags["n_embd"] * (12 * flags["n_layer"] * flags["n_embd"] + GPT2_TOKENS)
        chosen["eval_tokens"] = 8192 * max(1, 124_000_000 // size)
    # Not with --init-from: a network trained in float32 can have large activations, so bfloat16
    # would round away what is added to them.
    if on_gpu and not is_nano and flags["bf16"] and not flags["init_from"]:
        chosen["bf16_residual"] = True
    if not typed.get("micro_batch_size"):
        given["micro_batch_size"] = first_micro_batch(flags, world)  # instead of the saved one
    config = TrainConfig(**{name: flags[name] for name in DEFAULTS})
    config.num_micro_batches(world.size)  # raises if it is not whole
    return config


def make_python_source(data_dir: Path):
    """If data_dir is the folder for Python's source, prepare it, unless it is complete."""
    if data_dir.name.startswith("stdlib-") and not (data_dir / MANIFEST).exists():
        print(f"tokenizing Python's standard library into {data_dir}", flush=True)
        program = Path(__file__).with_name("prepare_data.py")
        tokenizer = data_dir.name.removeprefix("stdlib-")
        command = [sys.executable, str(program), "--tokenizer", tokenizer, "--data-dir"]
        if subprocess.call([*command, str(data_dir)]):  # it has printed why
            raise UserError(f"{data_dir} could not be made: name other data with --data-dir")


def first_micro_batch(flags: ChainMap, world: Any) -> int:
    """Return the micro-batch size to try first: the saved one, else 64 sequences on a GPU (as in
    the lecture), else 4,096 tokens; or less, so that a step has a whole number of them."""
    default = 64 if world.device.type == "cuda" else 4096 // flags["seq_len"]
    sizes = range(flags["micro_batch_size"] or default, 0, -1)
    tokens = flags["seq_len"] * world.size  # of a pass of one sequence on each rank
    return next((B for B in sizes if flags["batch_tokens"] % (B * tokens) == 0), 1)


def check_fixed(typed: dict, saved: dict):
    """Raise UserError if a typed flag would turn the saved run into a different one."""
    for f in fields(TrainConfig):
        before = saved.get(f.name, f.default)
        if f.metadata["fixed"] and typed.get(f.name, before) != before:
            has = spell(f.name, before)
            raise UserError(f"{spell(f.name, typed[f.name])}: the run to resume has {has}")
