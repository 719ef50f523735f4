"""Kill, stop and damage runs at random, for as long as asked, and see that nothing is lost.

    python tests/soak.py --minutes 60

Runs on 1, 2 and 3 ranks in turn, without dropout and with it, are started again with the same
command until they end by themselves. In between they die, their clock jumps, and checkpoints, the
log and the data are damaged. After each death the newest good checkpoint must be one that was
acknowledged, or newer. Each loss, validation and sample that a run ever logs must be, bit for bit,
that of a run that nothing happened to; at the end none may be missing, and the weights must be the
same.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import conftest

from support.checkpoint import checkpoints, newest, step_of
from support.cli import RunError

STEPS, DROPOUTS = 400, (0.0, 0.1)
DEATHS = ["KILL", "KILL", "KILL", "TERM", "TERM", "INT", "KILL-one", "STOP", "full-disk", "write"]
DAMAGES = ["none"] * 12 + ["bit", "cut", "deleted"] * 2 + ["log-bit", "log-cut", "log-deleted"]
DAMAGES += ["data-cut", "data-deleted"]
FIGURES = ("loss", "val_loss", "perplexity", "sample")


def disturb(room: int, operation: int, jump_s: float, rank: int):
    """Injection: a limit of the size of files, a death at one, and a clock that jumps."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    conftest.at_file_operation(operation, conftest.die, rank)
    clock, begin = time.time, time.monotonic()
    time.time = lambda: clock() + (jump_s if time.monotonic() - begin < 2 else -jump_s)


def send(processes: list, number: int):
    for process in processes:
        if process.is_alive():
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(process.pid, number)


class SoakedRun:
    """A run that is made to its end through deaths, and what it has logged in all of its lives."""

    def __init__(self, folder: Path, data: Path, dropout: float, ranks: int):
        changes = {"steps": STEPS, "save_every": 5, "keep": 3, "warmup_steps": 20, "eval_every": 15}
        line = conftest.flags(data_dir=data, out_dir="run", dropout=dropout, **changes)
        self.argv, self.ranks = [*line, "--auto-resume"], ranks
        self.folder, self.data, self.out_dir = folder, data, folder / "run"
        self.log, self.offset = folder / "run" / "log.jsonl", 0
        self.saved = 0  # the newest step that was acknowledged, and not damaged
        self.figures = {name: {} for name in FIGURES}

    def live(self, rng: random.Random, death: str) -> tuple[list[int], str]:
        """Start it, and have it die at some moment, or as soon as a save begins. Return the exit
        codes of the ranks, and what they wrote on stderr."""
        room = rng.randrange(60_000, 250_000) if death == "full-disk" else resource.RLIM_INFINITY
        operation = rng.randrange(1, 500) if death == "write" else 0
        inject = partial(disturb, room, operation, rng.choice([0, 3600, -86400 * 365]))
        processes = conftest.start_ranks(self.argv, self.folder, self.ranks, None, inject)
        moment, in_save = time.monotonic() + rng.uniform(0.2, 6), rng.random() < 0.5
        while all(process.is_alive() for process in processes) and time.monotonic() < moment:
            if in_save and any(self.out_dir.glob("*.tmp")):
                break
            time.sleep(0.001)
        if death not in ("full-disk", "write"):
            chosen = [rng.choice(processes)] if death == "KILL-one" else processes
            send(chosen, getattr(signal, f"SIG{death.partition('-')[0]}"))
        if death == "STOP":
            time.sleep(rng.uniform(0.1, 2))
            send(processes, signal.SIGCONT)
        while all(process.is_alive() for process in processes):
            time.sleep(0.01)
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # when one has failed, as torchrun does
            send(processes, number if any(process.exitcode for process in processes) else 0)
            for process in processes:
                process.join(15)
        codes = [process.exitcode for process in processes]
        assert None not in codes, "a rank hangs"
        return codes, "".join(path.read_text() for path in self.folder.glob("rank*.err"))

    def read_log(self):
        """Take in the whole lines that are new. A figure that is written again must be the same."""
        content = self.log.read_bytes()[self.offset :] if self.log.exists() else b""
        lines = content[: content.rfind(b"\n") + 1]
        self.offset += len(lines)
        for line in lines.splitlines():
            record = {}
            with suppress(ValueError):  # torn by a death
                record = json.loads(line)
            for name in record.keys() & {*FIGURES}:
                step, value = record["step"], record[name]
                assert self.figures[name].setdefault(step, value) == value, (name, record)
            self.saved = max(self.saved, record.get("saved", 0))

    def newest_good_step(self) -> int:
        with suppress(RunError):  # all are damaged
            path = newest(self.out_dir)
            return step_of(path) if path else 0
        return 0

    def damage(self, rng: random.Random, name: str):
        """Damage a file of the newest of several checkpoints, the log, or a shard."""
        *kind, how = name.split("-")
        files = [self.log] if kind == ["log"] else sorted(self.data.glob("train*.bin"))
        if not kind:
            paths = checkpoints(self.out_dir)[:-1][:1]
            files = sorted(file for path in paths for file in path.iterdir())
        if name == "log-deleted" and not checkpoints(self.out_dir):
            return  # a config.json without a log is taken for another program's
        path = rng.choice(files or [self.folder])
        size = path.stat().st_size if path.is_file() else 0
        if how == "deleted" and size:
            path.unlink()
        elif how == "cut" and size:
            os.truncate(path, rng.randrange(size))
        elif how == "bit" and size:
            conftest.flip(path, rng.randrange(8 * size))
        if name != "none":
            self.saved = self.newest_good_step()
        if kind == ["log"]:  # what is in it now was damaged after it was read
            self.offset = self.log.stat().st_size if self.log.exists() else 0

    def make(self, rng: random.Random, counts: Counter):
        whole, name = self.folder.with_name("whole"), ""
        shutil.copytree(self.data, whole, dirs_exist_ok=True)
        while True:
            death = rng.choice(DEATHS)
            codes, err = self.live(rng, death)
            self.read_log()
            counts.update(["starts", death] if any(codes) else ["starts"])
            counts["fell back"] += "is damaged" in err
            # 1: the disk is full, a rank has lost another one, or Ctrl-C came before the first step
            allowed = {0, 3, 130, 137, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
            allowed |= {1} if self.ranks > 1 or "KeyboardInterrupt" in err else set()
            allowed |= {1} if death == "full-disk" else set()
            allowed |= {1, 2} if "data" in name else set()
            assert {*codes} <= allowed, (codes, death, name, err)
            assert self.newest_good_step() >= self.saved, (self.saved, death)
            shutil.copytree(whole, self.data, dirs_exist_ok=True)
            if not any(codes):
                return
            name = rng.choice(DAMAGES)
            self.damage(rng, name)
            counts[f"damage {name}"] += 1


def soak(minutes: float, sizes: list[int], seed: int, work: Path) -> Iterator[Counter]:
    """Make runs for so many minutes, and yield after each what has happened and been found."""
    (work / "made").mkdir()
    data, counts, rng = conftest.make_data(work / "made"), Counter(), random.Random(seed)
    wholes, begin = {}, time.monotonic()
    for key in product(DROPOUTS, sizes):
        whole = wholes[key] = SoakedRun(work / f"whole-{key}", data, *key)
        assert conftest.train(whole.argv, whole.folder, whole.ranks)[0] == 0
        whole.read_log()
    for key in cycle(wholes):
        run, whole = SoakedRun(work / "soaked", data, *key), wholes[key]
        run.make(rng, counts)
        found = [(one.figures, conftest.digest(one.out_dir)) for one in (run, whole)]
        counts.update({"runs": 1, "runs that differ": found[0] != found[1]})
        shutil.rmtree(run.folder)
        counts["minutes"] = round((time.monotonic() - begin) / 60)
        yield counts
        if time.monotonic() - begin >= 60 * minutes:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as work:
        for counts in soak(args.minutes, args.ranks, args.seed, Path(work)):
            print(json.dumps(counts), flush=True)
    return int(counts["runs that differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
