"""Translates command lines and config files of nanoGPT, build-nanogpt and llm.c into our flags."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from support.cli import command, launched, typed_as
from support.ending import UserError
from support.files import did_you_mean
from support.run_folder import checkpoints

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
HINTS = {  # without a flag here: its fixed value as nanoGPT spells it, and what to say of others
    "beta2": ("0.95", "beta2 is 0.95, in make_optimizer in train_gpt2.py"),
    "bias": ("True", "the network has biases, like OpenAI's"),
}
UNUSED = {"wandb_project", "always_save_checkpoint", "backend", "lr_decay_iters", "wandb_run_name"}
OF_BATCH = {"gradient_accumulation_steps", "block_size", "dataset"}  # where nanoGPT's batch counts
OF_LLM_C = {"num_iterations", "sequence_length", "total_batch_size", "val_loss_every"}
OF_SAMPLE = {"start": "prompt", "max_new_tokens": "sample_tokens"}  # sample.py's
CONFIG = ".py"  # the name of a config file among the settings
FOREIGN = {*RENAMED, *COMPUTED, *HINTS, *UNUSED}
DEFAULTS: dict[str, float] = {"batch_size": 12, "gradient_accumulation_steps": 40}  # nanoGPT's
DEFAULTS |= {"learning_rate": 6e-4, "min_lr": 6e-5}
DTYPES: dict[str, dict] = {"float16": {"fp16": True}, "float32": {"bf16": False}}


def check_names(argv: list[str], known: set[str], known_to_eval: set[str]):
    """Raise UserError with the whole command in our flags if argv has a config file, or a flag that
    has another name here. `known` are the names of our flags, and `known_to_eval` those that an
    evaluation takes."""
    settings = dict(read_settings(argv))
    config = settings.pop(CONFIG, "")
    foreign = [name for name in settings if name in FOREIGN]
    foreign += ["init_from"] if settings.get("init_from") in ("scratch", "resume") else []
    foreign += [config] if config else []
    if not foreign:
        return
    is_whole = len(foreign) > 2  # a command line of nanoGPT's, not only a slip
    if config and is_whole:
        settings = {"dataset": "openwebtext"} | settings  # nanoGPT's default
    theirs = Path(config).parent.parent / "data" / settings.get("dataset", "")
    if config and "dataset" in settings and "data_dir" not in settings and os.path.isdir(theirs):
        settings["data_dir"] = str(theirs)  # the folder as seen from here
    if "" in settings:
        raise UserError(f"{settings['']}: flags begin with --")
    # A name that nobody knows stays, and is refused when the user repeats the command.
    flags = translate(settings, known)
    is_new = is_whole and not flags.keys() & {"init_from", "eval_only", "resume", "model"}
    if is_new:
        flags = {"model": "gpt2", "muon": False, "steps": 600_000} | flags
    if is_new and not settings.keys() & OF_LLM_C:
        settings = {"bias": "False", "warmup_iters": "2000"} | settings  # nanoGPT's defaults
        if int(flags["steps"]) > 2000:
            flags.setdefault("warmup_steps", 2000)
    elif is_whole and "init_from" in flags:
        flags = {"schedule": "cosine", "decay_to": 0.1} | flags  # a small network's recipe is nano
    if flags.get("eval_only"):
        flags = {name: flags[name] for name in flags if name in known_to_eval or name not in known}
    names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
    words = [command("train_gpt2.py"), *(typed_as(*flag) for flag in flags.items())]
    line = launched(" ".join(words))
    texts = [f"these are other programs' settings: {names}", *remarks(settings, flags)]
    if "data_dir" not in flags and (is_new or "eval_only" in flags):
        texts.append("without --data-dir, the data is Python's source")
    raise UserError(f"{'; '.join(texts)}. The closest command here: {line}")


def remarks(settings: dict[str, str], flags: dict) -> list[str]:
    """Return what is different here."""
    texts = [text for name, (ours, text) in HINTS.items() if settings.get(name, ours) != ours]
    if "wandb_project" in settings and flags.get("wandb"):
        texts.append(f"name the project by WANDB_PROJECT={settings['wandb_project']}")
    if "batch_tokens" in flags and "batch_tokens" not in settings:
        texts.append("sequences per pass are --micro-batch-size, by default as many as fit")
    warmup = settings.get("warmup_iters", "0")
    has_warmup = warmup.isdecimal() and flags.get("warmup_steps") != 0
    if has_warmup and int(warmup) >= int(flags.get("steps", 600_000)):
        texts.append(f"nanoGPT's warm-up, {warmup} steps, does not fit in this run")
    if str(settings.get("lr_decay_iters", flags.get("steps"))) != str(flags.get("steps")):
        texts.append("the rate decays until --steps, not lr_decay_iters")
    if str(flags.get("init_from")).endswith(".pt"):
        texts.append("the weights are taken, not the optimizer's state; steps begin at 0")
        if "data_dir" not in flags:
            texts.append("name the data that it was trained on, data/NAME, with --data-dir")
    if flags.get("resume"):
        texts.append("if there is no checkpoint, --resume begins a new run")
    if not flags.get("muon", True):
        texts.append("without --no-muon you get Muon, which needs fewer steps")
    return texts


def read_settings(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each setting on a command line and in the config files on it.
    Other words have no name, and that of a config file itself is CONFIG."""
    words = [*argv]
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("--") else "True"
            yield name.replace("-", "_"), value
        elif word.endswith(".py"):
            yield CONFIG, word
            yield from read_config(Path(word))
        else:
            yield "", word


def read_config(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the assignments in one of nanoGPT's config files. None of it is executed, so values
    that are not constants, such as time.time(), are left out."""
    if not os.path.exists(path):
        raise UserError(f"{path} is not here: type its path in your folder of nanoGPT")
    try:
        tree = ast.parse(path.read_bytes())
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
        left, right = constant(node.left), constant(node.right)
        is_product = isinstance(left, int | float) and isinstance(right, int | float)
        return left * right if is_product else None
    return node.value if isinstance(node, ast.Constant) else None


def translate(settings: dict[str, str], known: set[str]) -> dict:
    """Return our flags for these settings. Raise UserError if a value is not a number."""
    flags: dict = {}
    for name, value in settings.items():
        name = RENAMED.get(name, name)
        if name in known or name not in FOREIGN:
            flags[name] = {"true": True, "false": False}.get(value.lower(), value)
    if "dataset" in settings and "data_dir" not in settings:
        flags["data_dir"] = f"data/{settings['dataset']}"
    if settings.get("decay_lr", "True") == "False":  # there, this also drops the warm-up
        flags |= {"schedule": "constant", "warmup_steps": 0}
    if "dtype" in settings:
        flags |= DTYPES.get(settings["dtype"], {"bf16": True})
    out_dir = Path(settings.get("out_dir", "out"))
    theirs = out_dir / "ckpt.pt"
    has_theirs = os.path.exists(theirs) and not checkpoints(out_dir)
    if flags.get("init_from") == "resume" and has_theirs:
        flags["init_from"] = str(theirs)
        flags.pop("out_dir", None)
    elif flags.get("init_from") == "resume":
        flags["resume"] = True
    if flags.get("init_from") in ("resume", "scratch"):
        del flags["init_from"]
    try:
        steps = int(flags.get("steps", 600_000))
        if int(flags.get("warmup_steps", 0)) >= steps:
            flags["warmup_steps"] = steps - 1  # nanoGPT takes more
        return flags | computed(settings | flags)
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"this is not a command line of nanoGPT: {error}") from error


def computed(settings: dict) -> dict:
    """Return the flags whose values have another unit here."""
    flags: dict = {}
    numbers = {name: float(settings.get(name, DEFAULTS[name])) for name in DEFAULTS}
    B, T = int(numbers["batch_size"]), int(settings.get("seq_len", 1024))
    if "total_batch_size" in settings:
        flags |= {"micro_batch_size": B} if "batch_size" in settings else {}
    elif "batch_tokens" not in settings and settings.keys() & OF_BATCH:
        flags["batch_tokens"] = int(numbers["gradient_accumulation_steps"]) * B * T
    elif "batch_size" in settings:  # alone, and maybe of nobody's program
        flags["micro_batch_size"] = B
    if "eval_iters" in settings:
        flags["eval_tokens"] = int(settings["eval_iters"]) * B * T
    if "min_lr" in settings:
        flags["decay_to"] = float(f"{numbers['min_lr'] / numbers['learning_rate']:.3g}")
    return flags


def sample_flags(argv: list[str]) -> list[str]:
    """Return the command line of nanoGPT's sample.py as ours takes it."""
    words = []
    for name, value in read_settings(argv):
        value = os.path.expanduser(value) if name == "out_dir" else value
        if name == "out_dir" and not os.path.lexists(value):
            near = did_you_mean(value) or ": train_gpt2.py makes it"
            raise UserError(f"{value} is not there{near}")
        if name == "out_dir" and not checkpoints(Path(value)):
            theirs = Path(value, "ckpt.pt")
            value = str(theirs) if os.path.exists(theirs) else value
        if name in ("out_dir", "init_from"):
            words += [value] if value != "resume" else []
        elif name in OF_SAMPLE:
            words.append(f"--{OF_SAMPLE[name]}={value}")
        elif name not in ("dtype", "compile"):  # samples are float32, and compiling takes longer
            words.append(f"--{name}={value}" if name else value)
    return words
