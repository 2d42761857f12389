"""The tutorial's code is that of the programs it names, and its output is what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness.balancer_process import running_balancer, until_logged
from tests.docs.programs import printed_by_ranks

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/start/tutorial.md").read_text(encoding="utf-8")
PRINTED = dict(
    re.findall(r"```console\n\$ torchrun --nproc-per-node 2 -m examples\.tutorial\.(\w+)\n(.*?)```", TEXT, re.S)
)


@pytest.mark.parametrize("program", ["plain", "balanced", "torchrec_plain", "torchrec_balanced"])
def test_each_program_prints_what_the_page_shows(program: str, tmp_path: Path) -> None:
    assert printed_by_ranks(f"examples.tutorial.{program}", tmp_path) == PRINTED[program]


def test_with_a_service_the_output_is_the_same(tmp_path: Path) -> None:
    with running_balancer("--log-level", "debug") as balancer:
        printed = printed_by_ranks("examples.tutorial.balanced", tmp_path, EVENKEEL_BALANCER=balancer.address)
        until_logged(balancer, "round planned", 4)
    assert printed == PRINTED["balanced"]


def test_the_code_is_that_of_the_programs() -> None:
    programs = [path.read_text(encoding="utf-8") for path in (ROOT / "examples/tutorial").glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) > 5
    assert [block for block in blocks if not any(block in program for program in programs)] == []
