"""Every line that a service logs is JSON where no person looks on; that it holds no secret: `tests/faults`."""

import json
import subprocess
import sys
import textwrap
import time

import pytest
import structlog

from services.operations.program import Sparing


def test_whatever_writes_to_the_log_writes_json() -> None:
    code = """
        import asyncio, logging, warnings
        import structlog
        from services.operations.program import configure_logs
        configure_logs("info", "auto")
        structlog.get_logger("a").info("ours", job="j", step=3)
        structlog.get_logger("a").debug("too low")
        logging.getLogger("library").warning("theirs %s", 1)
        warnings.warn("old")
        def fails():
            password = "hunter2"
            raise RuntimeError(len(password))
        for logger in (structlog.get_logger("a"), logging.getLogger("library")):
            try:
                fails()
            except RuntimeError:
                logger.exception("went wrong")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"].partition(":")[0][:10], line["level"]) for line in lines[:2]] == [
        ("ours", "info"), ("theirs 1", "warning"),
    ]  # fmt: skip
    assert len(lines) == 5
    assert "old" in lines[2]["event"]
    assert all("RuntimeError: 7" in line["exception"] for line in lines[3:])
    assert all("timestamp" in line for line in lines)
    assert "hunter2" not in done.stderr
    assert done.stdout == ""


def test_lines_about_one_caller_are_spared_and_those_about_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sparing = Sparing(rate=1.0, burst=3.0)

    def passes(**event: str) -> dict[str, object] | None:
        try:
            return dict(sparing(None, "warning", event))
        except structlog.DropEvent:
            return None

    assert [passes(event="refused", caller="x") is not None for _ in range(10)] == [True] * 3 + [False] * 7
    assert passes(event="refused", caller="y") == {"event": "refused", "caller": "y", "left_out": 7}
    assert all(passes(event="serving") for _ in range(1000)), "lines about nobody are never spared"
    now += 1.0
    assert [passes(event="refused", caller="x") is not None for _ in range(2)] == [True, False]
