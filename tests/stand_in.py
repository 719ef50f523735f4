"""A stand-in for a GPU: builds it, and runs train_gpt2.py on it (fake_gpu.py), for tests and for
benchmarks/memory.py and traffic.py."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

CXX = os.environ.get("CXX", "g++")
PROGRAM = Path(__file__).with_name("fake_gpu.py")


def build(folder: Path) -> Path:
    """Compile the stand-in into folder."""
    torch_folder = Path(find_spec("torch").origin).parent
    library = folder / "fake_gpu.so"
    command = [CXX, "-shared", "-fPIC", "-std=c++20", PROGRAM.with_suffix(".cpp"), "-o", library]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def make_data(folder: Path) -> Path:
    """Write shards of zeros, enough for a step."""
    for name, count in (("train", 70_000), ("val", 9000)):
        header = np.zeros(256, "<i4")
        header[:3] = (20240520, 1, count)  # llm.c's magic number and version
        (folder / f"{name}_000000.bin").write_bytes(header.tobytes() + bytes(2 * count))
    return folder


def on_gpu(
    library: Path,
    *flags: str,
    gib: float = 1000,
    capability: str = "9.0",
    program: Path = PROGRAM,
    ddp: bool = False,
    kernels: Path | None = None,
) -> dict:
    """Return what train_gpt2.py and fake_gpu.py found on a stand-in for a GPU of so many GiB. With
    ddp, split the compiled graph as DDP does. Write Triton's kernels into the folder `kernels`."""
    command = [sys.executable, str(program), str(gib), capability, *flags]
    env = os.environ | {"FAKE_GPU": str(library), "OMP_NUM_THREADS": "1"}
    env |= {"FAKE_DDP": "1"} if ddp else {}
    env |= {"FAKE_KERNELS": str(kernels)} if kernels else {}
    if capability == "mps":
        env["FAKE_MAC"] = "1"
    with TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    *lines, last = done.stdout.splitlines() or [""]
    if not last.startswith("{"):
        raise OSError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(last) | {"stdout": "\n".join(lines), "stderr": done.stderr}


def step(library: Path, data: Path, model: str, flags: tuple, B: int = 0, **options) -> dict:
    """Make two steps of two passes of B sequences each, or of 64 sequences in passes that fit."""
    # two, because the first step has no moments yet
    line = [f"--model={model}", f"--data-dir={data}", "--steps=2", "--eval-tokens=8192"]
    line += ["--sample-tokens=1", f"--batch-tokens={1024 * (2 * B or 64)}"]
    line.append("--no-muon")  # AdamW keeps two moments of each weight, Muon one
    if B:
        line.append(f"--micro-batch-size={B}")
    return on_gpu(library, *line, *flags, **options)
