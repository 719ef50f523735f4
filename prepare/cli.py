"""A dataclass as a command line: each field is a flag."""

import argparse
import difflib
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from prepare.ending import UserError
from prepare.files import REPO

# What a resumed run does if a flag's value differs from the checkpoint's:
#     refuse       end with an error, because the network or the data would be different
#     inexact      use the new value, and say that the last bits of the result may change
#     allow        use the new value, and say so
#     per command  use the new value; the flag belongs to one command, so no checkpoint keeps it
OnResume = Literal["refuse", "inexact", "allow", "per command"]

PathName = Annotated[str, "a path"]
PathNames = Annotated[tuple, "paths"]


def flag(  # noqa: PLR0913
    default: Any,
    description: str,
    on_resume: OnResume = "allow",
    choices: Iterable[str] | None = None,
    min: float = 0,  # noqa: A002
    max: float = 2**31 - 1,  # noqa: A002
    group: str = "",
) -> Any:
    """Declare a dataclass field as a flag. In --help, a group starts at the flag that names it. The
    group "argument" is special: it makes the field an optional positional argument."""
    metadata = {"help": description, "min": min, "max": max, "choices": choices}
    return field(default=default, metadata=metadata | {"on_resume": on_resume, "group": group})


def spell(name: str) -> str:
    """Return a field's flag as the user types it: out_dir -> --out-dir."""
    return "--" + name.replace("_", "-")


def quoted(*words: str) -> str:
    """Return words as the user types them: cmd.exe would pass on the '...' of other shells."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def command(program: str, *words: str) -> str:
    """Return a command line for one of our programs that works in the current folder."""
    path = REPO / program
    with suppress(ValueError, OSError):  # on another drive of Windows, or the folder is gone
        path = Path(os.path.relpath(path))
    return quoted("python", str(path), *words)


def launched(line: str) -> str:
    """Return a command line with torchrun in place of python, if torchrun started this process."""
    size = os.environ.get("WORLD_SIZE") or "1"
    num_local = os.environ.get("LOCAL_WORLD_SIZE") or size
    if size == "1":
        return line
    where = "--standalone" if num_local == size else "[--nnodes=..., as before, on each machine]"
    return line.replace("python", f"torchrun {where} --nproc_per_node={num_local}", 1)


def typed_as(name: str, value) -> str:
    """Return a flag with its value as the user types it: --no-compile, --steps 50."""
    if isinstance(value, bool):
        return spell(name) if value else f"--no-{spell(name)[2:]}"
    return f"{spell(name)} {quoted(str(value))}"


def check_limits(kind: type, values: dict):
    """Raise UserError if a flag of the class `kind` is out of range."""
    for f in fields(kind):
        value, low, high = values.get(f.name), f.metadata["min"], f.metadata["max"]
        if isinstance(value, int | float) and not low <= value <= high:  # nan is in no range
            limit = f"at most {high}" if value > high else f"at least {low}"
            raise UserError(f"{spell(f.name)} {value} must be {limit}")


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError with a cure, whereas argparse would print its usage and exit."""

    synonyms: dict[str, str]  # flag of another program -> what to type instead

    def error(self, message: str):  # type: ignore[override]  # argparse's never returns either
        switch = re.match("argument (--.+)/(--no-.+): ignored explicit", message)
        if switch:
            raise UserError(f"{switch[1]} takes no value, nor does {switch[2]}")
        hint = "see --help"
        number = re.search(r"invalid (int|float) value: '(.*)'", message)
        if number:
            hint = "type a whole number" if number[1] == "int" else "type a number, such as 0.8"
            with suppress(ValueError, OverflowError):  # such as 1e3
                hint = f"try {int(float(number[2]))}"
        if "unrecognized" in message:
            if "--" not in message:  # such as `--compile true`, or a file without its flag
                hint = "flags begin with --, a switch takes no value, names with spaces need quotes"
                hint += ", and there are no config files"
            for name in re.findall(r"(?<=\s)--[^\s=]+", message):
                if name in self.synonyms:
                    raise UserError(f"{name} here is {self.synonyms[name]}")
                near = difflib.get_close_matches(name, self._option_string_actions, 1, 0.8)
                hint = f"did you mean {near[0]}?" if near else hint
        raise UserError(f"{message}; {hint}")


def parse(kind: type, doc: str, recipes: dict, synonyms: dict, argv: list[str]) -> dict:
    """Return the flags on a command line, by field name. Raise UserError if one is out of range.
    --help begins with the first line of doc, ends with the rest, and shows recipes' defaults."""
    description, _, epilog = doc.partition("\n")
    parser = OneLineParser(usage="%(prog)s [flags]", description=description, epilog=epilog)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.argument_default = argparse.SUPPRESS  # so that the result has only what the user typed
    parser.allow_abbrev = False
    parser.synonyms = synonyms
    group: argparse._ActionsContainer = parser
    for f in fields(kind):
        text = f.metadata["help"]
        # A path may begin with ~, which shells leave as it is in --name=~/...
        value_type = os.path.expanduser if f.type in (PathName, PathNames) else f.type
        options = {"type": value_type, "choices": f.metadata["choices"]}
        if f.metadata["group"] == "argument":
            parser.usage = f"%(prog)s [{f.name}] [flags]"
            parser.add_argument(f.name, nargs="?", help=text, **options)
            continue
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        if f.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif f.type is PathNames:
            options["nargs"] = "+"
        if "(default: " not in text:
            defaults = ["none" if f.default in ("", ()) else str(f.default)]
            for recipe, values in recipes.items():
                if values.get(f.name, f.default) != f.default:
                    defaults.append(f"{recipe} {values[f.name]}")
            text += f" (default: {'; '.join(defaults)})"
        group.add_argument(spell(f.name), help=text, **options)
    switches = {f.name for f in fields(kind) if f.type is bool}
    typed = vars(parser.parse_args([normalized(arg, switches) for arg in argv]))
    check_limits(kind, typed)
    return typed


def normalized(arg: str, switches: Iterable[str]) -> str:
    """Return an argument in argparse's spelling: --no-compile for nanoGPT's --compile=False."""
    name, equals, value = arg.partition("=")
    if not name.startswith("--"):
        return arg
    if value == "--":
        raise UserError(f"{arg}: -- ends the flags, and is not a value")  # argparse would drop it
    if name[2:].replace("-", "_") in switches and value.lower() in ("true", "false"):
        return typed_as(name[2:], value.lower() == "true")
    return name.replace("_", "-") + equals + value


def read_prompt(prompt: str) -> str:
    """Return --prompt, or if it is FILE:NAME, the text in that file."""
    if not prompt.startswith("FILE:"):
        return prompt
    try:
        return Path(prompt[5:]).expanduser().read_bytes().decode("utf-8-sig")
    except (OSError, ValueError, RuntimeError) as error:  # the last if there is no home folder
        raise UserError(f"--prompt {prompt} can't be read: {error}") from error
