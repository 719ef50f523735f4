"""Tests ../README.md and the pages beside it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_links():
    for page in (ROOT / "README.md", ROOT / "docs/reference.md", ROOT / "benchmarks/README.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]
                assert anchor in anchors, f"{page.name}: {target}"
