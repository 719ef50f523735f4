"""Tests ../support/text.py."""

from conftest import records, run


def test_a_sample_goes_on_from_the_prompt_and_is_always_the_same(data_dir, tmp_path):
    texts = [
        records(run(tmp_path, data_dir, name, prompt="abc ", sample_tokens=200), "sample")[12]
        for name in ("a", "b")
    ]
    assert texts[0] == texts[1] and texts[0].startswith("abc ") and len(texts[0]) > 100
