"""Put the tables of all results into benchmarks/README.md.

    python benchmarks/tables.py

Each table stands between two comments, <!-- ladder --> and <!-- end of ladder -->, and is made by
the program of that name from its files in benchmarks/results.
"""

import re

import ladder_report
import machine
import memory
import peers
import resume
import sweep

PAGE = machine.REPO / "benchmarks" / "README.md"
PROGRAMS = {"ladder": ladder_report, "peers": peers, "resume": resume, "sweep": sweep}


def put(page: str, name: str, text: str) -> str:
    """Return the page with this text between the comments of this name. The text links files that
    lie beside it, which are in another folder than the page."""
    text = re.sub(r"\]\((?!https?:)", "](results/", text)
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main():
    machine.OneLineParser(description=__doc__.splitlines()[0]).parse_args()  # --help alone
    page = PAGE.read_text(encoding="utf-8")
    if memory.RESULTS.exists():
        page = put(page, "memory", memory.block(machine.load(memory.RESULTS)))
    for name, program in PROGRAMS.items():
        paths = sorted(machine.RESULTS.glob(f"{name}-*.json"))
        if paths:
            page = put(page, name, program.block({path.name: machine.load(path) for path in paths}))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
