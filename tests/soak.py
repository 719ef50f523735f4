"""Runs are killed, stopped and damaged at random for as long as asked, and lose nothing.

    python tests/soak.py --minutes 60
    python tests/soak.py --minutes 1 --ranks 2 --seed 7     # the same deaths, moments and damages

One run after the other, on 1, 2 and 3 ranks in turn, without dropout and with it, is started again
with the same command until it ends by itself, every second time with its saves in the background,
as on a GPU. In between it dies in a way and at a moment that are drawn, its clock jumps, and what
lies on the disk is damaged: checkpoints, the log, the data. After each death the newest good
checkpoint must be one that was acknowledged, or newer. Each loss, validation and sample that it
ever writes must be, bit for bit, that of a run that nothing happened to, none may be missing at the
end, and the weights must be the same. Its data are prepared anew before each run, through deaths
and damages too, and must be the same bytes.

Writes benchmarks/results/soak-<device>-<date>.json.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import conftest
import machine
import numpy as np
import test_faults

import train_gpt2
from support.checkpoint import checkpoints, is_good, read_checkpoint
from support.files import locked

STEPS, DROPOUTS = 400, (0.0, 0.1)
DEATHS = {"KILL": 40, "TERM": 20, "INT": 10, "KILL of one rank": 15, "STOP and CONT": 10, "disk": 5}
DAMAGES = {"none": 60, "bit": 6, "cut": 6, "deleted": 4, "litter": 4, "log: bit": 4, "log: cut": 4,
           "log: foreign lines": 4, "log: deleted": 2, "data: bit": 2, "data: cut": 2,
           "data: deleted": 2}  # fmt: skip
LOST = ("runs that differ", "figures missing", "data that differ")  # counts that must stay 0
# what a log must have of each step where it is due
FIGURES = ("loss", "val_loss", "perplexity", "sample")


def command(data: Path, dropout: float) -> list[str]:
    changes = {"steps": STEPS, "save_every": 5, "keep": 3, "warmup_steps": 20, "eval_every": 15,
               "sample_tokens": 20}  # fmt: skip
    return [*conftest.flags(data_dir=data, out_dir="run", dropout=dropout, **changes), "--resume"]


def prepare(room: int, in_background: bool, jump_s: float, rank: int):
    """Injection: no file may grow beyond room bytes, so that a save fails; saves as on a GPU; a
    clock that is wrong, and jumps back by as much after a while."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    if in_background:
        train_gpt2.folder.Saver.in_background = property(lambda self: True)
    clock, begin = time.time, time.monotonic()
    time.time = lambda: clock() + (jump_s if time.monotonic() - begin < 2 else -jump_s)


def start(rng: random.Random, argv: list[str], folder: Path, ranks: int, death: str) -> list:
    room = rng.randrange(100_000, 250_000) if death == "disk" else resource.RLIM_INFINITY
    jump_s = rng.choice([0, 3600, -86400 * 365, 86400 * 3650])
    inject = partial(prepare, room, rng.random() < 0.5, jump_s)
    folder.mkdir(exist_ok=True)
    for name in ("rank0.out", "rank0.err"):  # it may end before it opens them
        (folder / name).write_text("")
    return conftest.start_ranks(argv, folder, ranks, inject=inject)


def bring_death(rng: random.Random, processes: list, death: str, folder: Path) -> bool:
    """Whether the run was still alive when it came. It comes at some moment of the run, or as soon
    as a save begins."""
    moment = time.monotonic() + rng.uniform(0.2, 6)
    in_save = rng.random() < 0.5
    while all(process.is_alive() for process in processes):
        saving = in_save and any((folder / "run").glob("*.tmp"))
        if time.monotonic() > moment or saving:
            break
        time.sleep(0.001)
    alive = all(process.is_alive() for process in processes)
    chosen = [rng.choice(processes)] if death in ("KILL of one rank", "TERM", "INT") else processes
    numbers = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "STOP and CONT": signal.SIGSTOP}
    for process in chosen if death != "disk" else []:
        send(process, numbers.get(death, signal.SIGKILL))
    if death == "STOP and CONT":
        time.sleep(rng.uniform(0.1, 2))
        for process in processes:
            send(process, signal.SIGCONT)
    return alive


def send(process, number: int):
    if process.is_alive():
        os.kill(process.pid, number)


def stop_the_rest(processes: list):
    """What torchrun does when a rank has died: those that can't notice it, since they have not met
    it yet, would wait for it. The others have ten seconds to notice it by themselves."""
    while all(process.is_alive() for process in processes):
        time.sleep(0.01)
    for process in processes if any(process.exitcode for process in processes) else []:
        process.join(10 if process.is_alive() else 0)
        send(process, signal.SIGTERM)


def end_of(processes: list, folder: Path) -> tuple[int, str]:
    """The exit code of rank 0, and its errors; another rank may die as rank 0 is done."""
    for process in processes:
        process.join(120)
        assert process.exitcode is not None, "a rank hangs"
    return processes[0].exitcode, (folder / "rank0.err").read_text()


class Ledger:
    """What a run has logged since it was begun, read before anything damages its log. A figure that
    is written again, as after a resume, must be what it was."""

    def __init__(self, log: Path):
        self.log, self.offset = log, 0
        self.saved, self.last_step = [], 0  # saves since the last damage of a checkpoint
        self.figures = {name: {} for name in FIGURES}

    def read(self):
        """Take in the whole lines that are new."""
        content = self.log.read_bytes()[self.offset :] if self.log.exists() else b""
        lines = content[: content.rfind(b"\n") + 1]
        self.offset += len(lines)
        for line in lines.splitlines():
            with suppress(ValueError):  # torn by a death
                self.take(json.loads(line))

    def take(self, record: dict):
        for name in record.keys() & {*FIGURES}:
            step, value = record["step"], record[name]
            assert self.figures[name].setdefault(step, value) == value, (name, record)
        if "loss" in record:
            self.last_step = max(self.last_step, record["step"])
        if "saved" in record:
            self.saved.append(record["saved"])

    def skip(self):
        """Leave out what is in the log now: it was damaged after it was read."""
        self.offset = self.log.stat().st_size if self.log.exists() else 0


def good_steps(folder: Path) -> list[int]:
    paths = checkpoints(folder / "run")
    return [read_checkpoint(path)["step"] for path in paths if is_good(path)]


def damaged(rng: random.Random, content: bytes, how: str) -> bytes:
    """content with one bit changed somewhere in the middle, or its end cut off."""
    if how == "cut":
        return content[: rng.randrange(len(content))]
    place = rng.randrange(len(content) // 4, 3 * len(content) // 4 + 1)
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def damage(rng: random.Random, folder: Path, data: Path, how: str) -> bool:
    """Damage the newest of at least two good checkpoints, the log, or a training shard."""
    kind, _, how = how.rpartition(": ")
    if how == "litter":
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / "checkpoint_999999.pt.tmp").write_bytes(b"half")
        return True
    log, shards = folder / "run" / "log.jsonl", sorted(data.glob("train*.bin"))
    path = log if kind == "log" else rng.choice(shards) if kind == "data" else None
    if not kind and how != "none" and len(good_steps(folder)) >= 2:
        path = checkpoints(folder / "run")[0]
    if not path or not path.exists() or path.stat().st_size < 8:
        return False
    if how == "deleted":
        path.unlink()
    elif how == "foreign lines":
        lines = ["null", "7", "[[[", '{"step": "x", "loss": {}}', '{"step": 1, "val_loss": null}']
        path.write_bytes(path.read_bytes() + "\n".join(lines).encode() + b"\n\xff\0\n")
    else:
        path.write_bytes(damaged(rng, path.read_bytes(), how))
    return True


def one_run(
    rng: random.Random, argv: list[str], folder: Path, data: Path, ranks: int, counts: Counter
) -> Ledger:
    """A run to its end, through deaths. Returns all that it logged."""
    ledger, owed, how = Ledger(folder / "run" / "log.jsonl"), 0, ""
    whole = shutil.copytree(data, folder.with_name("whole"))
    for _ in range(200):
        [death] = rng.choices(list(DEATHS), DEATHS.values())
        processes = start(rng, argv, folder, ranks, death)
        if bring_death(rng, processes, death, folder):
            counts[death] += 1
        stop_the_rest(processes)
        code, err = end_of(processes, folder)
        early = {-signal.SIGKILL, -signal.SIGTERM}  # before it had a handler
        if death == "INT" and not err + (folder / "rank0.out").read_text():
            early.add(1)  # before main: forkserver ends the child without a word
        bad_data = {2} if how.startswith("data") else set()
        expected = code in {0, 3, 5, 6, 130} | early | bad_data
        assert expected or "KeyboardInterrupt" in err, (code, death, how, err)
        assert "Traceback" not in err or re.search(r"KeyboardInterrupt(: )?\s*$", err), err
        ledger.read()
        counts["cycles"] += 1
        good = good_steps(folder)
        assert max(good, default=0) >= max(ledger.saved, default=owed), (ledger.saved, owed, good)
        assert len(good) >= min(2, len({*ledger.saved})), (ledger.saved, good)
        if how.startswith("data"):
            shutil.rmtree(data)
            shutil.copytree(whole, data)
        if code == 0:
            shutil.rmtree(whole)
            return ledger
        counts["steps redone"] += max(ledger.last_step - max(good, default=0), 0)
        ledger.last_step = min(ledger.last_step, max(good, default=0))
        counts["fell back"] += "trying the one before it" in err
        [how] = rng.choices(list(DAMAGES), DAMAGES.values())
        if not damage(rng, folder, data, how):
            how = "none"
            continue
        counts[f"damage: {how}"] += 1
        if how.startswith("log"):
            ledger.skip()
        ledger.saved, owed = [], max(good_steps(folder), default=0)
        locked(folder / "run").close()  # the system has freed it
    raise AssertionError("a run that never ends")


def make_data_through_deaths(rng: random.Random, work: Path, counts: Counter) -> Path:
    """The data once more, by a preparation that dies at any of its operations on files, and whose
    unfinished shards are damaged in between."""
    shutil.rmtree(work / "data", ignore_errors=True)
    (work / "data").mkdir()
    tokens = work / "data" / "tokens"
    while not tokens.exists():
        crash = test_faults.Crash(rng.randrange(1, 90))
        code = test_faults.in_child(partial(conftest.make_data, work / "data"), crash)
        assert code in (0, 137), code
        counts["preparations that died"] += code == 137
        files = sorted(tokens.with_name("tokens.unfinished").glob("*[0-9.n]"))
        if code and files and rng.random() < 0.3:
            how, path = rng.choice(["bit", "cut", "deleted"]), rng.choice(files)
            if how != "deleted" and path.stat().st_size > 8:
                path.write_bytes(damaged(rng, path.read_bytes(), how))
            else:
                path.unlink()
            counts["unfinished shards damaged"] += 1
    return tokens


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def soak(
    minutes: float, world_sizes: list[int], seed: int, work: Path, report: Callable
) -> Counter:
    """Runs for so many minutes; report is told after each what has been found so far."""
    (work / "data").mkdir()
    data, oracles, counts, rng = (
        conftest.make_data(work / "data"),
        {},
        Counter(),
        random.Random(seed),
    )
    bytes_of_data = contents(data)
    for dropout, ranks in product(DROPOUTS, world_sizes):
        oracle = work / f"oracle-{dropout}-{ranks}"
        code, _, err = conftest.train(command(data, dropout), oracle, ranks)
        assert code == 0, err
        ledger = Ledger(oracle / "run" / "log.jsonl")
        ledger.read()
        oracles[dropout, ranks] = ledger.figures, conftest.digest(oracle / "run")
    begin = time.monotonic()
    for dropout, ranks in cycle(product(DROPOUTS, world_sizes)):
        if time.monotonic() - begin >= 60 * minutes:
            return counts
        folder = work / "soaked"
        data = make_data_through_deaths(rng, work, counts)
        counts["data that differ"] += contents(data) != bytes_of_data
        ledger = one_run(rng, command(data, dropout), folder, data, ranks, counts)
        figures, digest = oracles[dropout, ranks]
        counts["figures missing"] += sum(
            len(figures[name].keys() - ledger.figures[name].keys()) for name in FIGURES
        )
        differs = (ledger.figures, conftest.digest(folder / "run")) != (figures, digest)
        counts["runs that differ"] += differs
        counts["runs"] += 1
        shutil.rmtree(folder)
        passed = (time.monotonic() - begin) / 60
        print(f"{passed:.1f} min: {json.dumps(counts)}", flush=True)
        report({"counts": counts, "minutes": passed})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    env = {"device": "cpu", "torch": str(train_gpt2.torch.__version__), "numpy": np.__version__}
    content = {"settings": vars(args), "environment": machine.environment(env)}
    path = machine.results_path("soak", content["environment"]["device_name"])
    with TemporaryDirectory() as work:
        report = lambda found: machine.save(path, content | found)  # noqa: E731
        counts = soak(args.minutes, args.ranks, args.seed, Path(work), report)
    print(path.relative_to(machine.REPO))
    return int(any(counts[name] for name in LOST))


if __name__ == "__main__":
    sys.exit(main())
