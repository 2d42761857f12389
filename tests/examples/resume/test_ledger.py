"""The ledger of a job is read while its ranks write."""

from __future__ import annotations

from pathlib import Path

from examples.resume.job import read_ledger


def test_a_run_without_a_whole_line_has_trained_nothing(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []
    (tmp_path / "1-0.jsonl").touch()
    assert read_ledger(tmp_path) == []
    (tmp_path / "1-0.jsonl").write_text('{"after": 0}\n{"step": 1, "users": [3]}\n{"step": 2, "use')
    expected = [{"step": 1, "users": [3], "rank": 0}]
    assert read_ledger(tmp_path) == expected
    (tmp_path / "2-0.jsonl").touch()
    assert read_ledger(tmp_path) == expected


def test_steps_after_the_checkpoint_of_a_later_run_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "1-0.jsonl").write_text('{"after": 0}\n{"step": 1}\n{"step": 2}\n')
    (tmp_path / "2-0.jsonl").write_text('{"after": 1}\n')
    assert read_ledger(tmp_path) == [{"step": 1, "rank": 0}]
