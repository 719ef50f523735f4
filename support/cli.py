"""A dataclass as a command line: each field is a flag. This module does not import torch."""

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import field, fields
from typing import Any


class RunError(Exception):
    """Ends the program with one line and exit code 1: a disk that is full, a loss of nan."""

    exit_code = 1
    is_of_one_rank = False  # else all ranks have it, and the main one prints it


class UserError(RunError):
    """A mistake of the user: one line and exit code 2."""

    exit_code = 2


def flag(  # noqa: PLR0913
    default: Any,
    text: str,
    keep: bool = False,
    choices: Iterable[str] | None = None,
    min: float = 0,  # noqa: A002
    max: float = 2**31 - 1,  # noqa: A002
    group: str = "",
) -> Any:
    """Declare a dataclass field as a flag. A resumed run can't change one that has `keep`. In
    --help, a group starts at the flag that names it."""
    metadata = {"text": text, "keep": keep, "choices": choices}
    return field(default=default, metadata=metadata | {"min": min, "max": max, "group": group})


def spell(name: str, value: Any = None) -> str:
    """Return a flag as the user types it: --out-dir, --no-compile, --steps 50."""
    name = name.replace("_", "-")
    if value is False:
        return f"--no-{name}"
    return f"--{name}" if value is None or value is True else f"--{name} {value}"


def check_values(kind: type, values: dict[str, Any]):
    """Raise UserError if a value for a flag of the class `kind` has a wrong type, is none of its
    choices or is out of its range."""
    for f in fields(kind):
        value, low, high = values.get(f.name, f.default), f.metadata["min"], f.metadata["max"]
        if type(value) is not f.type and not (f.type is float and type(value) is int):
            raise UserError(f"{spell(f.name)} {value!r} is no {type(f.default).__name__}")
        choices = f.metadata["choices"]
        if choices and value not in choices:
            raise UserError(f"{spell(f.name, value)} is none of {', '.join(choices)}")
        if f.type in (int, float) and not low <= value <= high:  # nan is in no range
            raise UserError(f"{spell(f.name, value)} is not in the range from {low} to {high}")


def report(error: Exception) -> int:
    """Print an error whose reason is known in one line, and return the exit code. What all ranks
    have, the main one prints."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or getattr(error, "is_of_one_rank", True):
        who = "error" if rank == "0" else f"error on rank {rank}"
        print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)
    return getattr(error, "exit_code", RunError.exit_code)


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str):  # type: ignore[override]  # argparse's never returns either
        raise UserError(f"{message}; see --help")


def make_parser(kind: type, doc: str, recipes: dict[str, dict] | None = None) -> Parser:
    """Return a parser with a flag for each field of the class `kind`. The result of parsing has
    only what was typed. --help begins with doc, and shows the defaults of recipes, too."""
    parser = Parser(usage="%(prog)s [flags]", description=doc, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.argument_default = argparse.SUPPRESS
    group: argparse._ActionsContainer = parser
    for f in fields(kind):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        text = f.metadata["text"]
        if "(default" not in text:
            defaults = [str(f.default) or "none"]
            for name, recipe in (recipes or {}).items():
                if recipe.get(f.name, f.default) != f.default:
                    defaults.append(f"{name} {recipe[f.name]}")
            text += f" (default: {'; '.join(defaults)})"
        if f.type is bool:
            group.add_argument(spell(f.name), help=text, action=argparse.BooleanOptionalAction)
        else:
            choices = f.metadata["choices"]
            group.add_argument(spell(f.name), help=text, type=f.type, choices=choices)
    return parser


def parse(parser: Parser, kind: type, argv: list[str]) -> dict[str, Any]:
    """Return the flags on a command line, by field name. Raise UserError if one is wrong."""
    switches = {spell(f.name) for f in fields(kind) if f.type is bool}
    words = []
    for arg in argv:
        if arg.encode(errors="replace").decode() != arg:  # log and checkpoints hold UTF-8
            raise UserError(f"{arg!a} is not UTF-8 text")
        name, equals, value = arg.partition("=")
        if name.startswith(
            "--"
        ):  # as argparse spells it: --no-compile for nanoGPT's --compile=False
            name = name.replace("_", "-")
            arg = name + equals + value
            if name in switches and value in ("True", "False"):
                arg = spell(name[2:], value == "True")
        words.append(arg)
    typed = vars(parser.parse_args(words))
    check_values(kind, typed)
    return typed
