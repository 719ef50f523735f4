"""Tests ../prepare/cores.py."""

import os

import pytest

from prepare import cores


@pytest.fixture(autouse=True)
def five_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 7}, raising=False)


def test_a_process_has_as_many_cores_as_it_may_use(monkeypatch, tmp_path):
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(cores, "LIMIT", limit)
    for text, number in {"250000 100000\n": 3, "max 100000\n": 5, "900000 100000\n": 5}.items():
        limit.write_text(text)
        assert cores.num_cores() == number
    limit.unlink()
    assert cores.num_cores() == 5


def test_the_share_of_busy_time_is_that_of_the_cores_this_process_may_use(monkeypatch, tmp_path):
    def stat(busy: dict[int, int]) -> str:
        """Each core was idle for 1,000 and has since been busy or idle for 10 hundredths."""
        rows = [f"cpu{n} {b} 0 0 {1010 - b} 0 0 0 0 5 5" for n, b in busy.items()]
        return "\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *rows, "intr 1 2"])

    times = tmp_path / "stat"
    monkeypatch.setattr(cores, "TIMES", times)
    for busy, share in (([0] * 8, 0), ([10] * 8, 1), ([10, 0, 0, 5, 9, 9, 9, 0], 0.3)):
        before = stat(dict.fromkeys(range(8), 0)).replace("1010", "1000")
        times.write_text(before)
        monkeypatch.setattr(
            cores.time, "sleep", lambda _, b=busy: times.write_text(stat(dict(enumerate(b))))
        )
        assert cores.busy_share() == pytest.approx(share)
    times.write_text("cpu0 what\n")
    assert cores.busy_share() == 0
    times.unlink()
    assert cores.busy_share() == 0
