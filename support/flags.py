"""A dataclass as a command line: each field is a flag, with its default, limits and help; mistakes
are ValueErrors of one line with the cure. Knows no flag by name."""

import argparse
import difflib
import math
import re
import sys
from argparse import BooleanOptionalAction
from dataclasses import field, fields


def flag(default, help: str, least: float = -math.inf, most: float | None = None, choices=None,
         needs: str = "", group: str = ""):  # fmt: skip
    """A field that is a flag. Given, it needs the flag of that name; the first of a group in --help
    names it."""
    most = most or (2**31 - 1 if type(default) is int else sys.float_info.max)
    limits = {"least": least, "most": most, "choices": choices, "needs": needs}
    return field(default=default, metadata={"help": help, "group": group} | limits)


def groups(kind: type) -> dict[str, list[str]]:
    """The names of the flags of each group of --help."""
    found, group = {}, ""
    for f in fields(kind):
        group = f.metadata["group"] or group
        found.setdefault(group, []).append(f.name)
    return found


def spell(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_flags(config):
    """ValueError if a flag of config is beyond what it may be, or lacks the one that it needs."""
    for f in fields(config):
        value, least, most = getattr(config, f.name), f.metadata["least"], f.metadata["most"]
        if isinstance(value, int | float) and not least <= value <= most:
            limit = f" and at most {most}" if most < sys.float_info.max else ""
            why = f"must be a number of at least {least}{limit}"
            raise ValueError(f"{spell(f.name)} {value} {why}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{spell(f.name)} holds a NUL, which no name does")
        needed = f.metadata["needs"]
        if needed and value != f.default and not getattr(config, needed):
            given = spell(f.name) if value is True else f"{spell(f.name)} {value}"
            usual = f"--no-{spell(f.name)[2:]}" if value is True else f"{spell(f.name)} {f.default}"
            cure = f"add it, or {usual}"
            raise ValueError(f"{given} needs {spell(needed)}: {cure}")


def known(kind: type, found: dict, **neutral) -> dict:
    """Those of found, as another run has recorded them, that kind has; ValueError if no kind can
    have them. neutral are flags that fit any others."""
    ours = {f.name: found[f.name] for f in fields(kind) if f.name in found}
    for f in fields(kind):
        value, choices = ours.get(f.name, f.default), f.metadata["choices"]
        if type(value) is not f.type or (choices and value not in choices):
            raise ValueError(f"its flags have {spell(f.name)} {value!s:.40}")
    kind(**neutral | ours)  # raises if they do not fit together
    return ours


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake as every other one of this program is: ValueError, one line, the cure.
    synonyms say what the flags of other programs are called here."""

    synonyms: dict[str, str] = {}

    def error(self, message: str):
        found = re.findall(r"(?<=\s)--[^\s=]+", message) if "unrecognized" in message else []
        here = {name: self.synonyms.get(name.replace("--no-", "--", 1)) for name in found}
        if known := [f"{name} here is {own}" for name, own in here.items() if own]:
            raise ValueError("; ".join(known))
        if switch := re.match("argument (--.+)/(--no-.+): ignored explicit", message):
            raise ValueError(f"{switch[1]} is a switch: type it, or {switch[2]}; see --help")
        near = found and difflib.get_close_matches(found[0], self._option_string_actions, 1, 0.8)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise ValueError(f"{message}; {hint}")


def default_text(name: str, default, recipes: dict[str, dict]) -> str:
    """A flag's default in words, with the recipes that have another."""
    own = {recipe: values.get(name, default) for recipe, values in recipes.items()}
    others = [f"{recipe} {value}" for recipe, value in own.items() if value != default]
    return "; ".join(["none" if default in ("", ()) else str(default), *others])


def make_parser(
    kind: type, doc: str, recipes: dict[str, dict], synonyms: dict[str, str] | None = None
) -> OneLineParser:
    """For the flags of kind, which a recipe gives other defaults. doc is a program's: --help begins
    with its first line, and ends with the others."""
    description, _, epilog = doc.partition("\n")
    parser = OneLineParser(usage="%(prog)s [flags]", description=description, epilog=epilog,
                           allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.synonyms = synonyms or {}
    for f in fields(kind):
        if title := f.metadata["group"]:
            group = parser.add_argument_group(title)
        kinds = {bool: {"action": BooleanOptionalAction}, tuple: {"nargs": "+"}}
        how = kinds.get(f.type, {"type": f.type})
        how |= {"choices": list(f.metadata["choices"])} if f.metadata["choices"] else {}
        text = f"{f.metadata['help']} (default: {default_text(f.name, f.default, recipes)})"
        group.add_argument(spell(f.name), default=argparse.SUPPRESS, help=text, **how)
    return parser


def parse(parser: OneLineParser, argv: list[str]) -> dict:
    """The flags that a command line gives. Takes nanoGPT's spelling too: --batch_tokens=4096
    --compile=False."""
    if wrong := [arg for arg in argv if re.fullmatch(r"--[\w-]+=--", arg)]:
        raise ValueError(f"{wrong[0]}: -- ends the flags, and is no value")  # argparse drops it
    plain = [re.sub(r"^--[\w-]+", lambda m: m[0].replace("_", "-"), arg) for arg in argv]
    plain = [re.sub(r"^--([\w-]+)=False$", r"--no-\1", arg) for arg in plain]
    return vars(parser.parse_args([re.sub(r"^(--[^=]+)=True$", r"\1", arg) for arg in plain]))


def up_to(last: str, names: tuple[str, ...]) -> dict[str, bool]:
    """Of flags that build on each other: last on, and those behind it off; nothing for "all"."""
    if last == "all":
        return {}
    own = [name.replace("-", "_") for name in names]
    num_on = ("none", *names).index(last)
    return dict.fromkeys(own[num_on:], False) | dict.fromkeys(own[num_on - 1 : num_on], True)
