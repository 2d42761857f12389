import time

import pytest
import structlog

from services.operations.program import Sparing


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
