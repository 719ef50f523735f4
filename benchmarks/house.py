"""Measure the source code of the program: sizes, density, the longest function, imports in circles.

    python benchmarks/house.py             # of this checkout
    python benchmarks/house.py OTHER       # beside that of another checkout

A code line holds at least one token that is neither a comment nor a part of a docstring.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

READ_FIRST = ("train_gpt2.py", "model.py", "dataloader.py")
COLLECTIVES = {
    *("sum", "gather", "gather_rows", "barrier", "check_same", "check_ranks_agree"),
    *("call_on_main", "call_on_all", "end_all"),  # today's names
    *("from_main", "on_all", "raise_on_all", "gather_shares"),  # up to 2026-11-25
}
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass
class Source:
    """What a file of Python holds."""

    name: str
    text: str

    def __post_init__(self):
        self.tree = ast.parse(self.text)
        self.num_lines = self.text.count("\n")
        docstrings = set()
        for node in ast.walk(self.tree):
            has_body = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            if has_body and ast.get_docstring(node) is not None:
                docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        self.code_lines = set()
        self.num_tokens = self.num_comments = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                self.num_comments += 1
            elif token.type not in LAYOUT and token.start[0] not in docstrings:
                self.num_tokens += 1
                self.code_lines.update(range(token.start[0], token.end[0] + 1))

    def functions(self) -> list[tuple[int, str]]:
        """Return the code lines of each function, and its name."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                lines = self.code_lines & set(range(node.lineno, node.end_lineno + 1))
                found.append((len(lines), f"{self.name}: {node.name}"))
        return found

    def num_collectives(self) -> int:
        """Return the calls in this file that all ranks must make."""
        count = 0
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                owner = ast.unparse(node.func).rpartition(".")[0]
                of_world = owner.endswith("world") or name == "check_ranks_agree"
                count += of_world and name in COLLECTIVES
        return count

    def imports(self) -> set[str]:
        """Return the modules that the file imports, also those inside functions and conditions."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found


def circles(sources: list[Source]) -> list[str]:
    """Return the modules that import themselves by way of others."""
    modules = {s.name.removesuffix(".py").replace("/", "."): s for s in sources}
    direct = {name: source.imports() & modules.keys() for name, source in modules.items()}
    found = []
    for start in modules:
        reached, queue = set(), [start]
        while queue:
            new = direct[queue.pop()] - reached
            reached |= new
            queue += new
        if start in reached:
            found.append(start)
    return found


def figures(root: Path) -> dict[str, str]:
    """Return the figures of a checkout by name."""

    def read(pattern: str) -> list[Source]:
        paths = sorted(root.glob(pattern))
        return [Source(str(p.relative_to(root)), p.read_text(encoding="utf-8")) for p in paths]

    program = [*read("*.py"), *read("support/*.py")]
    by_name = {source.name: source for source in program}
    script = by_name["train_gpt2.py"]
    config = by_name.get("config.py", script)
    code = sum(len(source.code_lines) for source in program)
    tokens = sum(source.num_tokens for source in program)
    longest = max(function for source in program for function in source.functions())
    first_torch = next(
        n for n, line in enumerate(script.text.splitlines(), 1) if line.startswith("import torch")
    )
    in_circles = circles(program)
    return {
        "lines read first": str(sum(by_name[name].num_lines for name in READ_FIRST)),
        "lines of train_gpt2.py": str(script.num_lines),
        "its first line of torch": str(first_torch),
        "lines of the program": str(sum(source.num_lines for source in program)),
        "files of the program": str(len(program)),
        "flags": str(config.text.count(" = flag(")),
        "tokens per code line": f"{tokens / code:.1f}",
        "comments per 100 code lines, train_gpt2.py": (
            f"{100 * script.num_comments / len(script.code_lines):.0f}"
        ),
        "longest function": f"{longest[0]} code lines, {longest[1]}",
        "collective calls in train_gpt2.py": str(script.num_collectives()),
        "modules in circles": f"{len(in_circles)} {' '.join(in_circles)}".strip(),
        "lines of benchmarks": str(sum(source.num_lines for source in read("benchmarks/*.py"))),
        "lines of tests": str(sum(source.num_lines for source in read("tests/*.py"))),
    }


def main() -> int:
    roots = [Path(__file__).resolve().parent.parent, *map(Path, sys.argv[1:])]
    columns = [figures(root) for root in reversed(roots)]
    print(f"| |{' before | after' if len(columns) > 1 else ''} |")
    print("|---" * (1 + len(columns)) + "|")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
