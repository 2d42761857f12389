import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.services.planner.serving import served

# What no schema can say (budgets that contradict each other, a plan of other tables) is refused with 422 nevertheless.
EXCLUDED = "positive_data_acceptance"


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="requests are made up by schemathesis")
def test_made_up_requests_get_documented_answers(tmp_path: Path) -> None:
    with served(tmp_path, "--requests-per-second", "100000") as running:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json"]
        command += ["--checks", "all", "--exclude-checks", EXCLUDED, "--phases", "fuzzing", "--max-examples", "3"]
        command += ["--seed", "1", "--no-color", "--request-timeout", "120"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    made = re.search(r"(\d+) generated", ended.stdout)
    assert int(made[1]) >= 10
