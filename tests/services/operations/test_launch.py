"""Services that other programs start for themselves."""

from __future__ import annotations

from pathlib import Path
from signal import SIGSTOP

import httpx
import pytest

from benchmarks.harness.balancer_process import fork
from services.operations.launch import running_service


def _is_up(port: int) -> bool:
    return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=30, trust_env=False).status_code == 200


def test_a_service_comes_back_at_its_port_and_ends_with_the_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    with running_service("services.planner", "--log-format", "json", log_file=log, spawn=fork) as planner:
        port = planner.port
        assert _is_up(port)
        assert planner.stop() == 0
        planner.start()
        assert planner.port == port
        assert _is_up(port)
        assert planner.log.count("planner_ready") == 2
        assert "earlier" not in planner.log
        planner.signal(SIGSTOP)  # also one that stands still is ended
    assert planner.running.poll() is not None


def test_what_keeps_a_service_from_starting_is_told() -> None:
    with (
        pytest.raises(RuntimeError, match=r"services\.planner did not start:\n.*--workers is '0'"),
        running_service("services.planner", "--workers", "0", spawn=fork),
    ):
        raise AssertionError("it has started")
