"""When does a vocabulary of the text's own pay? Train networks on texts, with bytes and with BPEs
of several sizes, in equal time, and draw their bits per byte.

    python benchmarks/vocabulary.py --steps 600,570,450,240 jargon.txt poems/ -- --model nano

Choose the steps for each vocabulary so that all take the same time. Python's source is always the
first text. Without --steps, only the picture and the table are made.
"""

import json
import sys
from argparse import ArgumentParser
from datetime import date
from pathlib import Path

import machine
import plot

VOCABULARIES = ("bytes", "1024", "4096", "16384")
SCHEDULE = "--schedule wsd --decay-share 0.8 --decay-to 0 --eval-every 0 --num-samples 0"


def train(text: str, vocabulary: str, steps: int, args) -> dict:
    """Tokenize a text and train a network on it, if that is not done yet. Return the figures."""
    label = Path(text).stem or "python"
    data, out = Path(f"data/{label}-{vocabulary}"), Path(f"out/{args.name}-{label}-{vocabulary}")
    line = ["--tokenizer", "bytes"] if vocabulary == "bytes" else ["--vocab-size", vocabulary]
    line += ["--input", text, "--val-fraction", "0.1"] if text else []
    prepare = [machine.REPO / "prepare_data.py", "--data-dir", data, *line]
    flags = [*SCHEDULE.split(), *args.flags, "--steps", steps, "--data-dir", data, "--out-dir", out]
    out.mkdir(parents=True, exist_ok=True)  # then --resume takes its name for no misspelling
    for command in (prepare, [machine.TRAIN, *flags, "--resume"]):
        code, errors = machine.run_quietly([sys.executable, *map(str, command)])
        if code:
            raise ValueError(machine.error_line(code, errors))
    run = plot.read_run(str(out))
    bits = run.values["bits_per_byte"][steps]
    return {"text": label, "vocabulary": vocabulary, "steps": steps, "bits_per_byte": bits}


def draw(path: Path, results: dict[str, list[dict]]):
    """Draw bits per byte by vocabulary: a panel for each network, a line for each text."""
    from matplotlib.figure import Figure

    figure = Figure((4 * len(results), 3.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, results.items(), strict=True):
        for text in dict.fromkeys(row["text"] for row in rows):
            mine = [row for row in rows if row["text"] == text]
            x, y = [row["vocabulary"] for row in mine], [row["bits_per_byte"] for row in mine]
            axes.plot(x, y, "o-", label=text)
        axes.set(title=name, xlabel="vocabulary", ylabel="validation loss, bits per byte")
        axes.legend()
    figure.savefig(path, dpi=200)


def main():
    parser = ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("texts", nargs="*", help="files or folders")
    parser.add_argument("--name", default="nano", help="of the network")
    parser.add_argument("--steps", default="", help="one number for each vocabulary")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.flags = sys.argv[end + 1 :]
    cpu = machine.short_name(machine.cpu_name()).lower().replace(" ", "-")
    path = machine.RESULTS / f"vocabulary-{cpu}-{date.today()}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    steps = [int(number) for number in args.steps.split(",") if number]
    if steps:
        results[args.name] = [
            train(text, vocabulary, number, args)
            for text in ("", *args.texts)
            for vocabulary, number in zip(VOCABULARIES, steps, strict=True)
        ]
        path.write_text(json.dumps(results, indent=1) + "\n")
    draw(path.with_suffix(".png"), results)
    for name, rows in results.items():
        for row in rows:
            print(f"{name:6} {row['text']:10} {row['vocabulary']:>6} {row['bits_per_byte']:.3f}")


if __name__ == "__main__":
    main()
