"""Runs are killed, stopped and damaged at random for as long as asked, and lose nothing.

    python tests/soak.py --minutes 60
    python tests/soak.py --minutes 1 --ranks 2 --seed 7     # the same deaths, moments and damages

One run after the other, on 1, 2 and 3 ranks in turn, without dropout and with it, is started again
with the same command until it ends by itself, every second time with its saves in the background,
as on a GPU. In between it dies in a way and at a moment that are drawn. After each death the newest
good checkpoint must be one that was acknowledged, or newer; at the end every loss and the weights
must be, bit for bit, those of a run that nothing happened to.

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
from functools import partial
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import conftest
import machine
import numpy as np

import dataloader
import train_gpt2

STEPS, SAVE_EVERY, DROPOUTS = 400, 5, (0.0, 0.1)
DEATHS = {"KILL": 40, "TERM": 20, "INT": 10, "KILL of one rank": 15, "STOP and CONT": 10, "disk": 5}
DAMAGES = {"none": 80, "bit": 6, "cut": 6, "deleted": 4, "litter": 4}


def command(data: Path, dropout: float) -> list[str]:
    changes = {"steps": STEPS, "save_every": SAVE_EVERY, "keep": 3, "warmup_steps": 20}
    return [*conftest.flags(data_dir=data, out_dir="run", dropout=dropout, **changes), "--resume"]


def prepare(room: int, in_background: bool, rank: int):
    """Injection: no file may grow beyond room bytes, so that a save fails; saves as on a GPU."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    if in_background:
        train_gpt2.Run.in_background = property(lambda self: True)


def start(rng: random.Random, argv: list[str], folder: Path, ranks: int, death: str) -> list:
    room = rng.randrange(100_000, 250_000) if death == "disk" else resource.RLIM_INFINITY
    inject = partial(prepare, room, rng.random() < 0.5)
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


def saves(folder: Path) -> list[int]:
    """The steps that the run said to be saved, in the order of its log."""
    return [r["saved"] for r in train_gpt2.read_log(folder / "run") if "saved" in r]


def good_steps(folder: Path) -> list[int]:
    paths = train_gpt2.checkpoints(folder / "run")
    return [train_gpt2.read_checkpoint(path)["step"] for path in paths if train_gpt2.is_good(path)]


def damage(rng: random.Random, folder: Path, how: str) -> bool:
    """Damage the newest of at least two good checkpoints."""
    paths = train_gpt2.checkpoints(folder / "run")
    if how == "litter":
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / "checkpoint_999999.pt.tmp").write_bytes(b"half")
    elif how == "none" or len(good_steps(folder)) < 2:
        return False
    elif how == "deleted":
        paths[0].unlink()
    else:
        content = bytearray(paths[0].read_bytes())
        content[rng.randrange(len(content) // 4, 3 * len(content) // 4)] ^= 1 << rng.randrange(8)
        paths[0].write_bytes(content if how == "bit" else content[: rng.randrange(len(content))])
    return True


def one_run(
    rng: random.Random, argv: list[str], folder: Path, ranks: int, counts: Counter
) -> float:
    """A run to its end, through deaths. Returns the longest time from a start to a step."""
    worst, seen, owed = 0.0, 0, 0  # saves before the last damage, and the step that was left then
    for _ in range(200):
        [death] = rng.choices(list(DEATHS), DEATHS.values())
        before, begin = last_step(folder), time.monotonic()
        processes = start(rng, argv, folder, ranks, death)
        if bring_death(rng, processes, death, folder):
            counts[death] += 1
        stop_the_rest(processes)
        code, err = end_of(processes, folder)
        early = (-signal.SIGKILL, -signal.SIGTERM)  # before it had a handler
        assert code in (0, 3, 5, 6, 130, *early) or "KeyboardInterrupt" in err, (code, err)
        assert "Traceback" not in err or re.search(r"KeyboardInterrupt(: )?\s*$", err), err
        counts["cycles"] += 1
        if last_step(folder) > before:
            worst = max(worst, first_step_after(folder, begin))
        saved, good = saves(folder)[seen:], good_steps(folder)
        assert max(good, default=0) >= max(saved, default=owed), (saved, owed, good)
        assert len(good) >= min(2, len(saved)), (saved, good)
        if code == 0:
            return worst
        counts["steps redone"] += max(last_step(folder) - max(good, default=0), 0)
        counts["fell back"] += "trying the one before it" in err
        [how] = rng.choices(list(DAMAGES), DAMAGES.values())
        if damage(rng, folder, how):
            counts[f"damage: {how}"] += 1
            seen, owed = len(saves(folder)), max(good_steps(folder), default=0)
        dataloader.locked(folder / "run").close()  # the system has freed it
    raise AssertionError("a run that never ends")


def last_step(folder: Path) -> int:
    return max((r["step"] for r in train_gpt2.read_log(folder / "run") if "loss" in r), default=0)


def first_step_after(folder: Path, begin: float) -> float:
    """Seconds from begin, a monotonic time, to the first step logged after it."""
    offset = time.time() - time.monotonic()
    times = [r["time"] - offset for r in train_gpt2.read_log(folder / "run") if "loss" in r]
    return min((t - begin for t in times if t > begin), default=0.0)


def bits(folder: Path) -> tuple:
    """All losses and the weights."""
    losses = conftest.records(folder / "run", "loss")
    return [loss.hex() for loss in losses.values()], conftest.digest(folder / "run")


def soak(
    minutes: float, world_sizes: list[int], seed: int, work: Path, report: Callable
) -> Counter:
    """Runs for so many minutes; report is told after each what has been found so far."""
    data, oracles, counts = conftest.make_data(work), {}, Counter()
    rng, worst = random.Random(seed), 0.0
    for dropout, ranks in product(DROPOUTS, world_sizes):
        oracle = work / f"oracle-{dropout}-{ranks}"
        code, _, err = conftest.train(command(data, dropout), oracle, ranks)
        assert code == 0, err
        oracles[dropout, ranks] = bits(oracle)
    begin = time.monotonic()
    for dropout, ranks in cycle(product(DROPOUTS, world_sizes)):
        if time.monotonic() - begin >= 60 * minutes:
            return counts
        folder = work / "soaked"
        worst = max(worst, one_run(rng, command(data, dropout), folder, ranks, counts))
        counts["runs that differ"] += bits(folder) != oracles[dropout, ranks]
        counts["runs"] += 1
        shutil.rmtree(folder)
        passed = (time.monotonic() - begin) / 60
        print(f"{passed:.1f} min: {json.dumps(counts)}", flush=True)
        report({"counts": counts, "worst_restart_s": worst, "minutes": passed})


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
    return int(counts["runs that differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
