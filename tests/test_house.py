"""Tests the house itself: who imports whom."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = sorted(path.stem for path in ROOT.glob("support/*.py") if path.stem != "__init__")


def imported(path: Path) -> set[str]:
    """The project's own modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = {path.stem for path in ROOT.glob("*.py")} | {f"support.{room}" for room in ROOMS}
    return names & own


def test_imports_go_one_way():
    """Down: the script, the rooms, then the model and the loader, which know nobody."""
    assert imported(ROOT / "model.py") == imported(ROOT / "dataloader.py") == set()
    assert imported(ROOT / "prepare_data.py") == {
        "dataloader", "support.corpus", "support.files", "support.flags", "support.inputs",
        "support.questions",
    }  # fmt: skip
    for room in ROOMS:
        found = imported(ROOT / "support" / f"{room}.py")
        assert not found & {"train_gpt2", "prepare_data"}, room
        assert sum(name.startswith("support.") for name in found) <= 2, (room, found)


def test_no_room_imports_itself_through_others():
    graph = {f"support.{r}": imported(ROOT / "support" / f"{r}.py") for r in ROOMS}
    for room in graph:
        seen, todo = set(), list(graph[room])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph.get(name, ())
        assert room not in seen
