"""Compile the kernels that Inductor generated (fake_compiler.py) for a card that need not be here,
by Triton and its own ptxas:

    python tests/ptx.py FOLDER CAPABILITY

Print, as JSON, a row for each kernel and configuration: its name, its bytes of shared memory and of
stack (registers that do not fit are spilled there), or why it does not compile.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import triton
from fake_compiler import CARDS, Driver
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(path: Path, capability: str) -> list[dict]:
    """Return the rows of the kernel in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, path.stem.partition("-")[2])
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    rows = []
    for config in kernel.configs:
        meta = kernel._create_compile_meta(config)
        source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = kernel._create_compile_options(config, meta)
        row = {"kernel": path.stem, "config": str(config)}
        try:
            binary = triton.compile(source, target=target, options=options)
        except Exception as error:
            rows.append(row | {"error": f"{type(error).__name__}: {error!s:.200}"})
            continue
        with TemporaryDirectory() as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(binary.asm["cubin"])
            command = [CUOBJDUMP, "-res-usage", file]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\d+)", usage)[1])
        rows.append(row | {"shared_memory": binary.metadata.shared, "stack": stack})
    return rows


def main(folder: str, capability: str):
    major, minor = map(int, capability.split("."))
    triton_helpers.set_driver_to_gpu = lambda: None
    triton.runtime.driver.set_active(Driver(capability))
    sources = {}  # without their numbers, by which equal kernels differ
    for path in sorted(Path(folder).iterdir()):
        sources.setdefault(re.sub(r"_\d+\b", "", path.read_text()), path)
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda _=None: (major, minor)),
        mock.patch.object(torch.version, "cuda", "13.0"),
    ):
        rows = [row for path in sources.values() for row in compiled(path, capability)]
    print(json.dumps({"shared_memory": CARDS[capability][2], "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
