"""Put the tables of all results into benchmarks/README.md.

    python benchmarks/tables.py

Each table stands between two comments, <!-- ladder --> and <!-- end of ladder -->, and is made by
the program of that name from its files in benchmarks/results.
"""

from collections.abc import Callable

import ladder_report
import machine
import memory
import peers
import resume
import sizes
import tokens_to_loss

PAGE = machine.REPO / "benchmarks" / "README.md"


def put(page: str, name: str, block: Callable[[dict], str], contents: dict) -> str:
    """Return the page with block(contents) between the comments of this name."""
    if not contents:
        return page
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    return f"{before}{begin}\n\n{block(contents)}\n\n{end}{after}"


def main():
    page = PAGE.read_text(encoding="utf-8")
    if memory.RESULTS.exists():
        page = put(page, "memory", memory.block, machine.load(memory.RESULTS))
    programs = {
        "ladder": ladder_report,
        "peers": peers,
        "tokens": tokens_to_loss,
        "resume": resume,
        "sizes": sizes,
    }
    for name, program in programs.items():
        paths = sorted(machine.RESULTS.glob(f"{name}-*.json"))
        contents = {path.name: machine.load(path) for path in paths}
        page = put(page, name, program.block, contents)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
