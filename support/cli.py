"""A dataclass as a command line: each field is a flag. This module does not import torch."""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from tqdm import tqdm


class RunError(Exception):
    """Ends the program with one line and exit code 1, for example on a full disk or a nan loss."""

    exit_code = 1
    is_of_one_rank = False  # False: every rank raises it, and only the main one prints it


class UserError(RunError):
    """A mistake of the user: one line and exit code 2."""

    exit_code = 2


def flag(default: Any, text: str, **more: Any) -> Any:
    """Declare a dataclass field as a flag. A resumed run can't change one that is `fixed`. `min`
    and `max` limit a number, `choices` text. `group` begins a group of --help."""
    usual = {"fixed": False, "min": 0, "max": 2**31 - 1, "choices": None}
    return field(default=default, metadata={"text": text} | usual | more)


def spell(name: str, value: Any = True) -> str:
    """Return a flag as the user types it: --out-dir, --no-compile, --steps 50."""
    name = name.replace("_", "-")
    if value is False:
        return f"--no-{name}"
    return f"--{name}" if value is True else f"--{name} {value}"


def report(error: Exception) -> int:
    """Print an error on one line, and return the exit code. If all ranks have it, one prints it."""
    if os.getenv("RANK", "0") == "0" or getattr(error, "is_of_one_rank", True):
        print("error:", *str(error).split(), file=sys.stderr)
    return getattr(error, "exit_code", 1)


def program(main: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
    """Make main return an exit code. Errors meant for the user are printed on one line."""

    def run(argv: list[str]) -> int:
        try:
            main(argv)
            return 0
        except (RunError, OSError, FloatingPointError) as error:  # the last if logits overflow
            return report(error)
        except ModuleNotFoundError as error:  # an optional library
            return report(UserError(f"{error.name} is missing: pip install {error.name}"))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return run


def show(text: str, end: str = "\n"):
    """Print text. Raise OSError if that fails, but not if the reader has left (`| head`)."""
    try:
        tqdm.write(text, end=end)  # above the bar, if there is one
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout again when it ends, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: of a terminal that is closed
            raise


class Parser(argparse.ArgumentParser):
    """The command line of a dataclass. Raises UserError where argparse would print and exit."""

    def __init__(self, kind: type, doc: str, names: tuple[str, ...] = ()):
        """Add the flags of a class, or those in names. --help begins with doc."""
        super().__init__(usage="%(prog)s [flags]", description=doc, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.argument_default = argparse.SUPPRESS
        self.flags = [f for f in fields(kind) if not names or f.name in names]
        group: Any = self
        for f in self.flags:
            if "group" in f.metadata:
                group = self.add_argument_group(f.metadata["group"])
            text = f.metadata["text"]
            if "(default" not in text:
                text += f" (default: {f.default!r})"
            how: dict = {"type": f.type, "choices": f.metadata["choices"]}
            if f.type is bool:
                how = {"action": argparse.BooleanOptionalAction}
            group.add_argument(spell(f.name), help=text, **how)

    def error(self, message: str):  # type: ignore[override]  # argparse's never returns either
        raise UserError(f"{message}; see --help")

    def parse(self, argv: list[str]) -> dict[str, Any]:
        """Return what was typed, by field name. Raise UserError if a flag is wrong."""
        switches = [spell(f.name) for f in self.flags if f.type is bool]
        words = []
        for arg in argv:
            if arg.encode(errors="replace").decode() != arg:  # log and checkpoints hold UTF-8
                raise UserError(f"{arg!a} is not UTF-8 text")
            name, equals, value = arg.partition("=")
            if name.startswith("--"):  # nanoGPT's --batch_size and --compile=False work, too
                name = name.replace("_", "-")
                arg = name + equals + value
            if name in switches and value in ("True", "False"):
                arg = spell(name[2:], value == "True")
            words.append(arg)
        typed = vars(self.parse_args(words))
        for f in self.flags:
            value, low, high = typed.get(f.name, f.default), f.metadata["min"], f.metadata["max"]
            if f.type in (int, float) and not low <= value <= high:  # nan is in no range
                raise UserError(f"{spell(f.name, value)} is not in the range from {low} to {high}")
        return typed
