"""Continue prompts with a run's model, one of its checkpoints, or any other GPT-2.
    python sample.py out/book                          # type prompts, or pipe them in
    python sample.py out/book/step_000700 --prompt "Once upon" --num-samples 3
    python sample.py gpt2 --prompt FILE:prompt.txt     # a name on the Hugging Face hub
    python sample.py ckpt.pt                           # a nanoGPT checkpoint
Without a name, sample from the newest run in out/.
"""

# `uv run sample.py` reads this and needs nothing else installed.
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "tiktoken==0.14.0",
#     "tqdm==4.70.1", "safetensors==0.8.0", "tokenizers==0.23.3",
# ]
# ///

import sys

from support import ending

if __name__ == "__main__":
    ending.program = "sample.py"
    ending.guard_imports()

import os
import signal
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from config import DEVICES, TrainConfig
from support import checkpoint, device, log, nanogpt
from support.cli import PathName, flag, parse, read_prompt
from support.ending import UserError
from support.evaluate import sample
from support.ranks import find_world
from support.run_folder import newest_run

OF_NANOGPT = {"--start", "--max-new-tokens", "--out-dir", "--init-from", "--dtype", "--compile"}


@dataclass(frozen=True)
class SampleConfig:
    model: PathName = flag(
        "", "a run, a checkpoint, weights, or a name on the hub", group="argument"
    )
    prompt: str = flag("", "text to continue, or FILE:NAME to read it (--start works too)")
    num_samples: int = flag(1, "samples per prompt", min=1)
    sample_tokens: int = flag(200, "maximum number of tokens per sample", min=1)
    temperature: float = flag(0.8, "sampling temperature; 0: always take the likeliest token")
    top_k: int = flag(50, "sample from the k likeliest tokens; 0: from all")
    seed: int = flag(1337, "the same seed gives the same samples")
    device: str = flag("auto", "device to compute on", choices=DEVICES)


def read_flags(argv: list[str]) -> dict:
    """Return the flags that the user typed, by name."""
    if OF_NANOGPT & {arg.partition("=")[0].replace("_", "-") for arg in argv}:
        argv = nanogpt.sample_flags(argv)
    typed = parse(SampleConfig, __doc__ or "", {}, {}, argv)
    if "prompt" in typed:
        typed["prompt"] = read_prompt(typed["prompt"])
    return typed


def read_prompts() -> Iterator[str]:
    """Yield each line of stdin, or an empty prompt if stdin is not a terminal and has no lines."""
    if log.is_terminal(sys.stdin):
        end = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
        ending.print_error(f"type the beginning of a text, or {end} to end")
        while True:
            ending.watchdog.stop()  # waiting for the user is not a hang
            try:
                yield input("prompt> ")
            except EOFError:
                log.show("")  # it leaves the cursor after "prompt> "
                return
    # Read only regular files and pipes, not a notebook's: other reads may block forever.
    kind = stat.S_IFMT(os.fstat(0).st_mode) if sys.stdin else 0
    if kind == stat.S_IFIFO and log.in_notebook():
        ending.print_error("in a notebook, give prompts with --prompt, or from a file: < FILE")
        kind = 0
    line = ""
    if kind in (stat.S_IFIFO, stat.S_IFREG):
        ending.print_error("no --prompt: reading prompts from stdin, one per line")
        # Windows puts a byte-order mark in front of UTF-8.
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")  # type: ignore
        for line in sys.stdin:
            yield line.removesuffix("\n")
            ending.watchdog.stop()
    if not line:
        yield ""


def show_samples(flags: SampleConfig, prompts: Iterable[str]):
    """Load the model, and print each prompt's samples token by token."""
    name = flags.model or newest_run(Path("out"))
    if not name:
        raise UserError("there is no run in out/: name a run, a checkpoint, or other weights")
    model, pretrained = checkpoint.open_model(str(name))
    model.to(find_world({}, torch.cuda.device_count(), flags.device).device)
    on_terminal = log.is_terminal(sys.stdin)
    ending.print_error(f"sampling from {pretrained.path}")
    sampling = asdict(flags) | {"model": "gpt2", "bf16": False, "warmup_steps": 0}
    for i, prompt in enumerate(prompts):
        try:
            config = TrainConfig(**sampling | {"prompt": prompt})
        except UserError as error:  # not UTF-8
            if flags.prompt:
                raise
            ending.print_error(str(error))  # of this line; the others are continued
            continue
        for number in range(config.num_samples):
            if number or (i and not on_terminal):
                log.show("---")
            for piece in sample(model, pretrained.tokenizer, config, number):
                log.show(piece, end="")
            log.show("")


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code. Only a bug shows a traceback."""
    ending.program = "sample.py"
    device.set_environment()
    try:
        typed = read_flags(sys.argv[1:] if argv is None else argv)
        prompts = [typed["prompt"]] if "prompt" in typed else read_prompts()
        show_samples(SampleConfig(**typed), prompts)
        return ending.DONE
    except (ending.RunError, FloatingPointError) as error:  # the latter if the logits overflow
        ending.print_error(f"error: {error}")
        return getattr(error, "exit_code", UserError.exit_code)
    except KeyboardInterrupt:
        return ending.INTERRUPTED
    finally:
        ending.watchdog.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main returns 130, on Windows too
    sys.exit(main())
