from __future__ import annotations

import json
import subprocess
import sys

from tests.evenkeel.placement.hostile import LIMIT_S, MEMORY_BYTES, REQUESTS


def test_small_requests_keep_their_time_limit_and_take_little_memory() -> None:
    command = [sys.executable, "-m", "tests.evenkeel.placement.hostile"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    outcomes = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [outcome["request"] for outcome in outcomes] == list(REQUESTS)
    for outcome in outcomes:
        assert outcome["seconds"] < LIMIT_S + 1, outcome
        assert outcome["peak_bytes"] < MEMORY_BYTES, outcome
    assert outcomes[0]["outcome"] == "INFEASIBLE"
