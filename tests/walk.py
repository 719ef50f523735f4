"""Walk the README on this system, as a user would: on Windows too, where few tests of signals run.

    python tests/walk.py           # --wine: without Ctrl-Break, which Wine does not deliver

It prepares data from all formats, trains, is stopped (Ctrl-C, or Ctrl-Break on Windows), is killed,
goes on, samples, draws, and climbs two rungs of the ladder. It prints what it does, and ends with 1
at the first step that goes wrong. It takes a few minutes, and writes into a temporary folder.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parent.parent
TINY = "--model nano --n-layer 2 --n-head 2 --n-embd 32 --seq-len 64 --batch-tokens 512"
TINY += " --eval-tokens 2048 --sample-tokens 20 --data-dir data/mine"
TEXTS = [f"Line {n}: in some 書 text, words are repeated.\r\n" * 20 for n in range(60)]


def run(code: int, expected: str, program: str, *flags: str, stdin: bytes = b"") -> str:
    """Run a program, and see how it ends and what it says."""
    print(">", program, *flags, flush=True)
    command = [sys.executable, REPO / program, *flags]
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    if done.returncode != code or expected not in out:
        sys.exit(f"exit code {done.returncode} instead of {code}, or no {expected!r} in:\n{out}")
    return out


def break_off(out_dir: str, stop: bool) -> int:
    """Start a run that never ends, stop or kill it after a save, and return its exit code."""
    flags = [*TINY.split(), "--steps", "1000000", "--save-every", "5", "--eval-every", "0"]
    group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {}
    command = [sys.executable, REPO / "train_gpt2.py", *flags, "--out-dir", out_dir, "--resume"]
    print("> train_gpt2.py --steps 1000000,", "stopped" if stop else "killed", flush=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, **group) as process:
        newest = max(Path(out_dir).glob("step_*"), default=None)
        while max(Path(out_dir).glob("step_??????"), default=newest) == newest:
            time.sleep(0.1)
            if process.poll() is not None:
                sys.exit(f"it ended by itself, with {process.returncode}")
        run(2, "belongs to a live run", "train_gpt2.py", *flags, "--out-dir", out_dir, "--resume")
        run(0, "words", "sample.py", out_dir, "--prompt", "words")
        if stop:
            process.send_signal(signal.CTRL_BREAK_EVENT if os.name == "nt" else signal.SIGINT)
        else:
            process.kill()
    return process.returncode


def write_texts():
    """Write the same texts in each format that prepare_data.py reads."""
    records = [json.dumps({"text": text}) for text in TEXTS]
    lines = "".join(record + "\n" for record in records).encode()
    quoted = "".join(f'"{text}"\r\n' for text in TEXTS)
    files = {"book.txt": "".join(TEXTS).encode("utf-8-sig"), "lines.jsonl": lines}
    files |= {
        "list.json": f"[{','.join(records)}]".encode(),
        "lines.jsonl.gz": gzip.compress(lines),
    }
    files |= {f"table.{kind}": f"text\r\n{quoted}".encode() for kind in ("csv", "tsv")}
    for name, content in files.items():
        Path("texts", name).write_bytes(content)
    if find_spec("pyarrow"):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), "texts/table.parquet")


def walk():
    Path("texts").mkdir()
    write_texts()
    for file in sorted(Path("texts").iterdir()):
        prepare = ("prepare_data.py", "--input", str(file), "--data-dir", f"data/{file.name}")
        run(0, "ready: python train_gpt2.py", *prepare)
        run(0, "already complete", *prepare)
    run(0, "ready: ", "prepare_data.py", "--input", "texts", "--data-dir", "data/mine")

    run(
        0, "done: 20 steps", "train_gpt2.py", *TINY.split(), "--steps", "20", "--out-dir", "out/a b"
    )
    run(0, "done: 30 steps", "train_gpt2.py", "--out-dir", "out/a b", "--resume", "--steps", "30")
    run(0, "already complete", "train_gpt2.py", "--out-dir", "out/a b", "--resume", "--steps", "30")
    if "--wine" not in sys.argv:
        stopped = break_off("out/c", stop=True)
        log = Path("out/c/log.jsonl").read_text()
        if stopped != 3 or '"stopped"' not in log.splitlines()[-1]:
            sys.exit(f"a signal ended the run with {stopped} instead of 3: {log[-200:]}")
    break_off("out/c", stop=False)
    run(0, "validation tokens: loss", "train_gpt2.py", "--out-dir", "out/c", "--eval-only")
    steps = int(max(Path("out/c").glob("step_??????")).name[5:]) + 10
    go_on = ("train_gpt2.py", "--out-dir", "out/c", "--resume", "--steps", str(steps))
    run(0, "resumed after step", *go_on)

    prompts = "The 書\nA word\n".encode("utf-8-sig")  # as Windows writes it
    run(0, "\n---\n", "sample.py", "out/a b", stdin=prompts.replace(b"\n", os.linesep.encode()))
    run(2, "--steps 0 must be", "train_gpt2.py", "--steps", "0")
    if find_spec("matplotlib"):
        run(0, "curves.png", "benchmarks/plot.py", "out/a b", "out/c")
        ladder = ("--steps", "4", "--micro-batch-size", "2", "--seq-len", "64", "--quick")
        ladder += ("--data-dir", str(Path("data/mine").resolve()), "--only", "flash", "pad-vocab")
        run(0, "pad-vocab", "benchmarks/ladder.py", *ladder)


if __name__ == "__main__":
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        walk()
        os.chdir(REPO)  # Windows can't remove a current folder
    print("all is well")
