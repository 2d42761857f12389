import io
import threading
import time

import pytest
import structlog

from services.operations.lines import BackgroundWriter, Sparing


class Stalled(io.StringIO):
    """Where nobody reads until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.entered = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.go.wait(30)
        return super().write(text)


def test_nobody_waits_for_a_log_that_is_not_read_and_what_was_left_out_is_counted() -> None:
    stalled = Stalled()
    writer = BackgroundWriter(stalled, max_bytes=1000)
    writer.write("first\n")
    assert stalled.entered.wait(30)
    for number in range(1000):
        writer.write(f"line {number:04}\n")
    stalled.go.set()
    writer.close()
    lines = stalled.getvalue().splitlines()
    assert lines[:2] == ["first", "line 0000"]
    assert 50 <= len(lines) <= 110
    (said,) = [line for line in lines if "left out" in line]
    assert int(said.split()[0]) == 1000 - (len(lines) - 2)


def test_lines_are_written_in_order_before_it_closes() -> None:
    stream = io.StringIO()
    writer = BackgroundWriter(stream)
    for number in range(500):
        writer.write(f"{number}\n")
    writer.close()
    assert stream.getvalue().split() == [str(number) for number in range(500)]


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
    assert passes(event="refused", caller="x") is not None
    assert passes(event="refused", caller="x") is None
