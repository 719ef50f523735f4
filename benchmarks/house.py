"""Measure the source code of the program: sizes, density, the longest function, imports in circles.

python benchmarks/house.py [OTHER]   # beside that of another checkout
"""

import ast
import io
import sys
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

READ_FIRST = ("train_gpt2.py", "model.py", "dataloader.py")
COLLECTIVES = "sum gather barrier check_same call_on_main call_on_all end_all"
COLLECTIVES += " from_main on_all raise_on_all"  # the names up to 010cfd1
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Source:
    """A file of Python, measured."""

    def __init__(self, root: Path, path: Path):
        self.name = str(path.relative_to(root))
        self.text = path.read_text(encoding="utf-8")
        self.num_lines = self.text.count("\n")
        self.nodes = list(ast.walk(ast.parse(self.text)))
        docstrings = set()
        for node in self.nodes:
            has_body = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            if has_body and ast.get_docstring(node) is not None:
                docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        self.code_lines = set()  # those with a token that is in no comment and no docstring
        self.num_tokens = self.num_comments = 0
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                self.num_comments += 1
            elif token.type not in LAYOUT and token.start[0] not in docstrings:
                self.num_tokens += 1
                self.code_lines.update(range(token.start[0], token.end[0] + 1))

    def longest_function(self) -> tuple[int, str]:
        """Return the code lines of the longest function, and its name."""
        found = [(0, "")]
        for f in self.nodes:
            if isinstance(f, ast.FunctionDef):
                lines = self.code_lines & set(range(f.lineno, f.end_lineno + 1))
                found.append((len(lines), f"{self.name}: {f.name}"))
        return max(found)

    def num_collectives(self) -> int:
        """Return the calls in this file that all ranks must make."""
        calls = [ast.unparse(node.func) for node in self.nodes if isinstance(node, ast.Call)]
        methods = tuple(f"world.{name}" for name in COLLECTIVES.split())
        return sum(name.endswith(methods) or name == "check_ranks_agree" for name in calls)

    def imports(self) -> set[str]:
        """Return the modules that the file imports, also inside functions and conditions."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                found.update([module[:-1], *(module + alias.name for alias in node.names)])
        return found


def circle(program: list[Source]) -> list[str]:
    """Return modules that import each other in a circle, if there are any."""
    imports = {s.name.removesuffix(".py").replace("/", "."): s.imports() for s in program}
    try:
        TopologicalSorter({name: imports[name] & imports.keys() for name in imports}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def figures(root: Path) -> dict[str, object]:
    """Return the figures of a checkout by name."""
    program = [Source(root, p) for p in sorted([*root.glob("*.py"), *root.glob("support/*.py")])]
    by_name = {source.name: source for source in program}
    script = by_name["train_gpt2.py"]
    length, longest = max(source.longest_function() for source in program)
    code = sum(len(source.code_lines) for source in program)
    return {
        "lines read first": sum(by_name[name].num_lines for name in READ_FIRST),
        "lines of train_gpt2.py": script.num_lines,
        "lines of the program": sum(source.num_lines for source in program),
        "flags": by_name.get("config.py", script).text.count(" = flag("),
        "tokens per code line": f"{sum(s.num_tokens for s in program) / code:.1f}",
        "comments per 100 code lines": f"{100 * sum(s.num_comments for s in program) / code:.0f}",
        "longest function": f"{length} code lines, {longest}",
        "collective calls in train_gpt2.py": script.num_collectives(),
        "modules in a circle": " ".join(circle(program)) or 0,
        "lines of benchmarks": sum(p.read_text().count("\n") for p in root.glob("benchmarks/*.py")),
        "lines of tests": sum(p.read_text().count("\n") for p in root.glob("tests/*.py")),
    }


if __name__ == "__main__":
    columns = [figures(Path(root).resolve()) for root in [*sys.argv[1:], Path(__file__).parents[1]]]
    for name in columns[0]:
        print(f"| {name} | {' | '.join(str(column[name]) for column in columns)} |")
