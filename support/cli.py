"""A dataclass as a command line: each field is a flag. This module knows no flag by name."""

import argparse
import difflib
import re
import shlex
from contextlib import suppress
from dataclasses import field, fields

from support.errors import UserError

# What a resumed run may do with a flag: see TrainConfig.
KEEP, ROUNDS, FREE, ONCE = "keep", "rounds", "free", "once"
INT_MAX = 2**31 - 1


def flag(  # noqa: PLR0913
    default,
    description: str,
    on_resume: str = FREE,
    *,
    min: float = 0,  # noqa: A002
    max: float = INT_MAX,  # noqa: A002
    choices: tuple | dict | None = None,
    group: str = "",
):
    """Declare a dataclass field that is a flag. The first flag of a group in --help names it."""
    metadata = {"help": description, "min": min, "max": max, "choices": choices}
    return field(default=default, metadata=metadata | {"on_resume": on_resume, "group": group})


def spell(name: str) -> str:
    """Return the flag of a field as it is typed: out_dir -> --out-dir."""
    return "--" + name.replace("_", "-")


def typed_as(name: str, value) -> str:
    """Return how a flag with this value is typed: --no-compile, --steps 50, --prompt 'def '."""
    if isinstance(value, bool):
        return spell(name) if value else f"--no-{spell(name)[2:]}"
    return f"{spell(name)} {shlex.quote(str(value))}"


def check_limits(kind: type, values: dict):
    """Raise UserError if one of these values of kind's flags is out of its range."""
    for f in fields(kind):
        value, low, high = values.get(f.name), f.metadata["min"], f.metadata["max"]
        if isinstance(value, int | float) and not low <= value <= high:  # nan is in no range
            limit = f"at most {high}" if value > high else f"at least {low}"
            raise UserError(f"{spell(f.name)} {value} must be {limit}")


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError with a cure where argparse would print its usage and exit."""

    synonyms: dict[str, str]  # what the flags of other programs are called here

    def error(self, message: str):
        switch = re.match("argument (--.+)/(--no-.+): ignored explicit", message)
        if switch:
            raise UserError(f"{switch[1]} is a switch: type it, or {switch[2]}")
        hint = "see --help"
        number = re.search(r"invalid (int|float) value: '(.*)'", message)
        if number:
            hint = "type a whole number" if number[1] == "int" else "type a number"
            with suppress(ValueError, OverflowError):  # such as 1e3
                hint = f"try {int(float(number[2]))}"
        if "unrecognized" in message:
            if "--" not in message:  # as `--compile true`, or a file without its flag
                hint = "flags begin with --, a switch takes no value, and there are no config files"
            for name in re.findall(r"(?<=\s)--[^\s=]+", message):
                if name in self.synonyms:
                    raise UserError(f"{name} here is {self.synonyms[name]}")
                near = difflib.get_close_matches(name, self._option_string_actions, 1, 0.8)
                hint = f"did you mean {near[0]}?" if near else hint
        raise UserError(f"{message}; {hint}")


def default_text(name: str, default, recipes: dict[str, dict]) -> str:
    """Return a flag's default, and the other ones that recipes have: "50; nano 1200"."""
    texts = ["none" if default in ("", ()) else str(default)]
    for recipe, values in recipes.items():
        if values.get(name, default) != default:
            texts.append(f"{recipe} {values[name]}")
    return "; ".join(texts)


def parse(kind: type, doc: str, recipes: dict, synonyms: dict, argv: list[str]) -> dict:
    """Return the flags of kind that a command line gives, by field name, each within its limits.
    --help begins with the first line of doc and ends with the others. recipes give some flags other
    defaults. nanoGPT's spelling works too: --batch_tokens=4096 --compile=False."""
    description, _, epilog = doc.partition("\n")
    parser = OneLineParser(usage="%(prog)s [flags]", description=description, epilog=epilog)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.synonyms = synonyms
    group = parser
    for f in fields(kind):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        options = {"type": f.type, "choices": f.metadata["choices"]}
        if f.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif f.type is tuple:
            options = {"nargs": "+"}
        text = f.metadata["help"]
        if "(default: " not in text:
            text += f" (default: {default_text(f.name, f.default, recipes)})"
        # SUPPRESS, so that only what was typed is in the result.
        group.add_argument(spell(f.name), default=argparse.SUPPRESS, help=text, **options)
    typed = vars(parser.parse_args([as_argparse_has_it(arg) for arg in argv]))
    check_limits(kind, typed)
    return typed


def as_argparse_has_it(arg: str) -> str:
    name, equals, value = arg.partition("=")
    if not name.startswith("--"):
        return arg
    if value == "--":
        raise UserError(f"{arg}: -- ends the flags, and is not a value")  # argparse drops it
    if value in ("True", "False"):
        return typed_as(name[2:], value == "True")
    return name.replace("_", "-") + equals + value
