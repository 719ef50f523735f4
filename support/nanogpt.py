"""Translates command lines and config files of nanoGPT, build-nanogpt and llm.c into our flags."""

import ast
from collections.abc import Iterator
from pathlib import Path

from support.cli import typed_as
from support.ending import UserError

RENAMED = {  # to flags that take the same value
    "block_size": "seq_len",
    "eval_interval": "eval_every",
    "log_interval": "log_every",
    "lr": "learning_rate",
    "max_iters": "steps",
    "num_iterations": "steps",
    "sequence_length": "seq_len",
    "total_batch_size": "batch_tokens",
    "val_loss_every": "eval_every",
    "wandb_log": "wandb",
    "warmup_iters": "warmup_steps",
}
COMPUTED = {"batch_size", "dataset", "decay_lr", "dtype", "eval_iters", "min_lr"}
COMPUTED |= {"gradient_accumulation_steps"}
HINTS = {  # what has no flag here
    "beta2": "beta2 is 0.95: change it in make_optimizer in train_gpt2.py",
    "bias": "the network has biases, as OpenAI's",
    "wandb_project": "the environment variable WANDB_PROJECT names the project",
}
UNUSED = {"always_save_checkpoint", "backend", "lr_decay_iters", "wandb_run_name"}
FOREIGN = {*RENAMED, *COMPUTED, *HINTS, *UNUSED}
DEFAULTS = {"batch_size": 12, "learning_rate": 6e-4, "min_lr": 6e-5}  # nanoGPT's
DEFAULTS |= {"gradient_accumulation_steps": 1}  # what nanoGPT's config files for one GPU have
DTYPES: dict[str, dict] = {"float16": {"fp16": True}, "float32": {"bf16": False}}


def check_names(argv: list[str], known: set[str]):
    """Raise UserError with the whole command in our flags if argv has a config file, or a flag that
    has another name here. `known` are the names of our flags."""
    settings = dict(read_settings(argv))
    foreign = [name for name in settings if name in FOREIGN]
    foreign += [name for name in ["init_from"] if settings.get(name) in ("scratch", "resume")]
    if not foreign:
        return
    # A name that nobody knows stays, and is refused when the user repeats the command.
    flags = translate(settings, known)
    line = " ".join(["python train_gpt2.py", *(typed_as(*flag) for flag in flags.items())])
    names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
    hints = [HINTS[name] for name in HINTS if name in settings]
    hints.append("add --no-muon to train with AdamW, as nanoGPT does")
    raise UserError("; ".join([f"these settings ({names}) are here: {line}", *hints]))


def read_settings(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each setting on a command line and in the config files on it."""
    words = iter([*argv, ""])
    word = next(words)
    while word:
        name, equals, value = word.removeprefix("--").partition("=")
        following = next(words, "")
        if word.startswith("--") and not equals and not following.startswith("--"):
            value, following = following or "True", next(words, "")
        if word.startswith("--"):
            yield name.replace("-", "_"), value or "True"
        elif word.endswith(".py"):
            yield from read_config(Path(word))
        word = following


def read_config(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the assignments in one of nanoGPT's config files. None of it is executed, so values
    that are no constants, such as time.time(), are left out."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} can't be read as a config file of nanoGPT: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = constant(node.value)
            if value is not None:
                yield node.targets[0].id, str(value)


def constant(node: ast.expr):
    """Return the value of a number, a string, a switch or a product of numbers, else None."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = constant(node.left), constant(node.right)
        return factors[0] * factors[1] if None not in factors else None
    return node.value if isinstance(node, ast.Constant) else None


def translate(settings: dict[str, str], known: set[str]) -> dict:
    """Return our flags for these settings. Raise UserError if a number is none."""
    flags: dict = {}
    for name, value in settings.items():
        name = RENAMED.get(name, name)
        if name in known or name not in FOREIGN:
            flags[name] = {"true": True, "false": False}.get(value.lower(), value)
    if "dataset" in settings:
        flags["data_dir"] = f"data/{settings['dataset']}"
    if settings.get("decay_lr", "True") == "False":
        flags["schedule"] = "constant"
    if "dtype" in settings:
        flags |= DTYPES.get(settings["dtype"], {"bf16": True})
    if flags.get("init_from") == "resume":
        flags["resume"] = True
    if flags.get("init_from") in ("resume", "scratch"):
        del flags["init_from"]
    try:
        return flags | computed(settings, int(flags.get("seq_len", 1024)))
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"this is no command line of nanoGPT: {error}") from error


def computed(settings: dict[str, str], T: int) -> dict:
    """Return the flags whose values have another unit here."""
    flags: dict = {}
    numbers = {name: float(settings.get(name, DEFAULTS[name])) for name in DEFAULTS}
    B = int(numbers["batch_size"])
    if "total_batch_size" in settings:
        flags["micro_batch_size"] = B
    elif settings.keys() & {"batch_size", "gradient_accumulation_steps"}:
        flags["batch_tokens"] = int(numbers["gradient_accumulation_steps"]) * B * T
    if "eval_iters" in settings:
        flags["eval_tokens"] = int(settings["eval_iters"]) * B * T
    if "min_lr" in settings:
        flags["decay_to"] = float(f"{numbers['min_lr'] / numbers['learning_rate']:.3g}")
    return flags
