"""How fast prepare_data.py tokenizes and how fast dataloader.py reads, on this machine.

    python benchmarks/data.py                        # both
    python benchmarks/data.py --only tokenizing --megabytes 600 --workers 1 2

Tokenizing: GPT-2's tokens of the Python source on this machine, by prepare_data.py and by the
usual way, in turns: a multiprocessing pool over the documents, encode_ordinary and np.array of its
list, tokens gathered in an array of a shard's size. Both are whole programs, from start to shards
on disk, with as many processes, on the same files. Beside them the rate of tiktoken's encoder
alone, in one process, of text in memory.

Loading: 1,000 shards of 100 million tokens, sparse, are opened in a fresh process, with a manifest
and without; then batches are read from two whole shards in the page cache, by one core.

For Linux. Writes results/data-<device>-<date>.json.
"""

import argparse
import base64
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zlib
from argparse import Namespace
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import machine
import numpy as np

sys.path.insert(0, str(machine.REPO))
SHARD_TOKENS = 100_000_000

# --------------------------------------------------------------------------------------------------
# Tokenizing


def collect(folder: Path, megabytes: int) -> list[Path]:
    """Copies of the Python source that this interpreter can import, repeated up to the size."""
    found = sorted(file for path in sys.path[1:] for file in Path(path).rglob("*.py"))
    copies, size = [], 0
    for n in range(10**9):
        text = found[n % len(found)].read_bytes()
        copies.append(folder / f"{n:07}.py")
        copies[-1].write_bytes(text)
        size += len(text)
        if size >= megabytes * 1e6:
            return copies


def encoder_alone(files: list[Path]) -> dict[str, float]:
    """MB/s of tiktoken's two calls, in one process, of about 20 MB in memory."""
    import tiktoken

    encoding, step = tiktoken.get_encoding("gpt2"), len(files) // 1200 + 1
    texts = [file.read_bytes().decode(errors="replace") for file in files[::step]]
    size = sum(len(text.encode()) for text in texts) / 1e6
    rates = {}
    for name in ("encode_ordinary", "encode_to_numpy"):
        encode = getattr(encoding, name)
        options = {"disallowed_special": ()} if name == "encode_to_numpy" else {}
        start = time.perf_counter()
        for text in texts:
            encode(text, **options)
        rates[name] = size / (time.perf_counter() - start)
    return rates


def usual_tokenize(file: Path) -> np.ndarray:
    import tiktoken

    text = file.read_bytes().decode(errors="replace")
    return np.array([50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)], np.uint16)


def usual_way(folder: Path, out: Path, workers: int):
    """What is usually written, down to the shard's size; the last shard alone is kept short."""
    buffer, count, num_shards = np.empty(SHARD_TOKENS, np.uint16), 0, 0
    with multiprocessing.Pool(workers) as pool:
        for tokens in pool.imap(usual_tokenize, sorted(folder.iterdir()), chunksize=16):
            room = SHARD_TOKENS - count
            buffer[count : count + len(tokens)] = tokens[:room]
            count += len(tokens[:room])
            if len(tokens) > room:
                buffer.tofile(out / f"train_{num_shards:06d}.bin")
                num_shards, count = num_shards + 1, len(tokens) - room
                buffer[:count] = tokens[room:]
    buffer[:count].tofile(out / f"train_{num_shards:06d}.bin")


def watched(command: list) -> tuple[float, float]:
    """Seconds that a program took, and the most MiB that it and its children held at once, pages
    that they share counted once."""
    start, peak = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        family = [process.pid]
        for pid in family:
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            family += [int(child) for task in tasks for child in read(task).split()]
        found = re.findall(r"\nPss: +(\d+)", "".join(map(rollup, family)))
        peak = max(peak, sum(map(int, found)) / 1024)
        time.sleep(0.25)
    seconds = time.perf_counter() - start
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return seconds, peak


def rollup(pid: int) -> str:
    return read(Path(f"/proc/{pid}/smaps_rollup"))


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


def tokenizing(work: Path, args: Namespace) -> dict:
    """The rounds, for each number of processes, and their summary."""
    (work / "text").mkdir()
    files = collect(work / "text", args.megabytes)
    size = sum(file.stat().st_size for file in files) / 1e6
    results = {"megabytes": size, "documents": len(files), "processes": {}}
    for workers in args.workers:
        ours = [machine.REPO / "prepare_data.py", "--input", work / "text", "--tokenizer", "gpt2",
                "--data-dir", work / "out", "--workers", str(workers)]  # fmt: skip
        theirs = [__file__, "--usual", work / "text", work / "out", str(workers)]
        programs, rounds = {"prepare_data.py": ours, "usual way": theirs}, []
        for _ in range(args.rounds):
            rounds.append({"alone": encoder_alone(files)})
            for name, program in programs.items():
                seconds, peak = watched([sys.executable, *program])
                rounds[-1][name] = {"mb_per_s": size / seconds, "peak_mib": peak}
                shutil.rmtree(work / "out")
            programs = dict(reversed(programs.items()))
        results["processes"][workers] = summarize(rounds, workers) | {"rounds": rounds}
        print(f"{workers} processes: {json.dumps(summarize(rounds, workers))}", file=sys.stderr)
    return results


def summarize(rounds: list[dict], workers: int) -> dict:
    speeds = {n: median(r[n]["mb_per_s"] for r in rounds) for n in ("prepare_data.py", "usual way")}
    alone = {k: median(r["alone"][k] for r in rounds) for k in rounds[0]["alone"]}
    ratios = [r["prepare_data.py"]["mb_per_s"] / r["usual way"]["mb_per_s"] for r in rounds]
    return {
        "mb_per_s": speeds | alone,
        "ratio": median(ratios),
        "ratio_of_rounds": ratios,
        "share_of_encoder": {k: speeds["prepare_data.py"] / workers / v for k, v in alone.items()},
        "peak_mib": {name: max(r[name]["peak_mib"] for r in rounds) for name in speeds},
    }


# --------------------------------------------------------------------------------------------------
# Loading


def sparse_shards(folder: Path, manifest: bool):
    """1,000 shards of zeros that take no room on the disk."""
    from dataloader import CHUNK, HEADER_BYTES, shard_header
    from support.corpus import MANIFEST

    folder.mkdir()
    num_chunks, rest = divmod(SHARD_TOKENS, CHUNK)
    crcs = [zlib.crc32(bytes(2 * CHUNK))] * num_chunks + [zlib.crc32(bytes(2 * rest))]
    crc32 = base64.b64encode(np.array(crcs, "<u4")).decode()
    names = ["val_000000.bin", *(f"train_{n:06d}.bin" for n in range(999))]
    for name in names:
        with open(folder / name, "wb") as f:
            f.write(shard_header(SHARD_TOKENS))
            f.truncate(HEADER_BYTES + 2 * SHARD_TOKENS)
    entries = [{"name": name, "tokens": SHARD_TOKENS, "largest_id": 0, "bytes": 0,
                "chunk_crc32": crc32}
               for name in names]  # fmt: skip
    splits = {"val": {"shards": entries[:1]}, "train": {"shards": entries[1:]}}
    if manifest:
        text = json.dumps({"tokenizer": {"name": "gpt2"}, **splits})
        (folder / MANIFEST).write_text(text)


def opening(folder: Path) -> dict[str, float]:
    """In this fresh process: opening the folder, and reading sequences of a shuffled epoch."""
    import dataloader
    from support import corpus

    before = peak_kib()
    start = time.perf_counter()
    data = corpus.open_folder(folder)
    loader = dataloader.ShardLoader(data.train, 64, 1024, seed=1)
    seconds = time.perf_counter() - start
    places = np.random.default_rng(0).integers(0, len(loader), 2000).tolist()
    start = time.perf_counter()
    for number in places:
        loader[number]
    each = (time.perf_counter() - start) / len(places)
    mib = (peak_kib() - before) / 1024
    return {"open_s": seconds, "open_mib": mib, "random_access_us": 1e6 * each}


def peak_kib() -> int:
    """The most memory that this process had so far."""
    return int(re.search(r"VmHWM:\s*(\d+)", read(Path("/proc/self/status")))[1])


def batches(work: Path) -> dict[str, float]:
    """Million tokens per second of next_batch, B 64, T 1024, by one core, from the page cache."""
    import dataloader
    import prepare_data
    from support import corpus

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shards, rates = [], {}
    for n in range(2):
        path = work / f"{n}.bin"
        tokens = np.random.default_rng(n).integers(0, 50257, SHARD_TOKENS, np.uint16)
        path.write_bytes(dataloader.shard_header(SHARD_TOKENS) + tokens.tobytes())
        shards.append(dataloader.open_shard(path))
    checked = [corpus.open_entry(work, prepare_data.describe(shard)) for shard in shards]
    for name, some in (("without CRCs", shards), ("with CRCs", checked)):
        for order, seed in (("in disk order", None), ("shuffled", 1)):
            loader = dataloader.ShardLoader(some, 64, 1024, seed=seed)
            times = []
            for _ in range(300):
                start = time.perf_counter()
                loader.next_batch()
                times.append(time.perf_counter() - start)
            rates[f"{name}, {order}"] = 64 * 1024 / median(times[20:]) / 1e6
    return rates


def loading(work: Path, args: Namespace) -> dict:
    results = {}
    for name in ("without manifest", "with manifest"):
        sparse_shards(work / name, name == "with manifest")
        command = [sys.executable, __file__, "--opening", work / name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[name] = json.loads(output)
        shutil.rmtree(work / name)
    results["mtokens_per_s"] = batches(work)
    print(json.dumps(results, indent=1), file=sys.stderr)
    return results


# --------------------------------------------------------------------------------------------------


def block(contents: dict[str, dict]) -> str:
    """What benchmarks/README.md shows of these results, by file name."""
    return "\n\n".join(report(content, name) for name, content in contents.items())


def report(content: dict, file: str) -> str:
    env, speeds, loading = content["environment"], [], content["loading"]
    head = f"**{machine.plain(env['device_name'])}, {env['cores']} cores**, {content['date']}"
    for number, found in content["tokenizing"]["processes"].items():
        row = {"processes": number}
        for name, label in (("prepare_data.py", "prepare_data.py"), ("usual way", "usual")):
            row[f"{label}: MB/s"] = f"{found['mb_per_s'][name]:.1f}"
            row[f"{label}: MiB"] = f"{found['peak_mib'][name]:,.0f}"
        row["ratio"] = f"{found['ratio']:.2f}"
        row["encode_ordinary alone: MB/s"] = f"{found['mb_per_s']['encode_ordinary']:.1f}"
        speeds.append(row)
    folders = []
    for name in ("with manifest", "without manifest"):
        crcs = name.replace("manifest", "CRCs")
        row = {"1,000 shards": name, "opened in s": f"{loading[name]['open_s']:.2f}"}
        row["MiB"] = f"{loading[name]['open_mib']:.0f}"
        row["any sequence, us"] = f"{loading[name]['random_access_us']:.0f}"
        for order in ("shuffled", "in disk order"):
            row[f"Mtokens/s {order}"] = f"{loading['mtokens_per_s'][f'{crcs}, {order}']:.0f}"
        folders.append(row)
    tables = machine.markdown(speeds), machine.markdown(folders)
    return "\n\n".join([f"{head} ([figures](results/{file})):", *tables])


def environment() -> dict:
    return {
        "commit": machine.output("git", "-C", str(machine.REPO), "rev-parse", "HEAD"),
        "changed": machine.changed_files(),
        "device_name": machine.cpu_name(),
        "cores": machine.num_cores(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def parse_args() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=["tokenizing", "loading"], help="one of the two")
    add("--megabytes", type=int, default=400, help="of text (default: 400)")
    add("--workers", type=int, nargs="+", default=[1, 2], help="processes (default: 1 and 2)")
    add("--rounds", type=int, default=3, help="runs of each program (default: 3)")
    add("--readme", type=Path, nargs="+", metavar="JSON", help="show these in benchmarks/README.md")
    add("--usual", nargs=3, help=argparse.SUPPRESS)  # the usual way, in this process
    add("--opening", type=Path, help=argparse.SUPPRESS)  # opening a folder, in this process
    return parser.parse_args()


def measure(args: Namespace) -> Path:
    """Write the results, and return where; the next run of the day replaces them."""
    results = {"date": str(date.today()), "environment": environment()}
    parts = [part for part in (tokenizing, loading) if args.only in (None, part.__name__)]
    for part in parts:
        with TemporaryDirectory() as work:
            results[part.__name__] = part(Path(work), args)
    path = machine.results_path("data", results["environment"]["device_name"], args.only or "")
    machine.save(path, results)
    return path.relative_to(machine.REPO)


def main():
    args = parse_args()
    if args.opening:
        return print(json.dumps(opening(args.opening)))
    if args.usual:
        folder, out, workers = args.usual
        Path(out).mkdir()
        return usual_way(Path(folder), Path(out), int(workers))
    if args.readme:
        contents = {path.name: machine.load(path) for path in args.readme}
        return machine.put_into_readme("data", block(contents))
    print(measure(args))


if __name__ == "__main__":
    main()
