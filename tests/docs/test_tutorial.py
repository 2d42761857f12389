"""The tutorial's code is that of the programs it names, and its output is what they print."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import running_balancer

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
PRINTED = dict(
    re.findall(r"```console\n\$ torchrun --nproc-per-node 2 -m examples\.tutorial\.(\w+)\n(.*?)```", TEXT, re.S)
)


def _output(program: str, folder: Path, **environment: str) -> str:
    """What rank 0 of two prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        zygote.Program(
            f"examples.tutorial.{program}", output=folder / f"{rank}.out", errors=folder / f"{rank}.err",
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        codes = [rank.wait(90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "".join(path.read_text() for path in folder.glob("*.err"))
    return (folder / "0.out").read_text()


@pytest.mark.parametrize("program", ["plain", "balanced", "torchrec_plain", "torchrec_balanced"])
def test_each_program_prints_what_the_page_shows(program: str, tmp_path: Path) -> None:
    assert _output(program, tmp_path) == PRINTED[program]


def test_with_a_service_the_output_is_the_same(tmp_path: Path) -> None:
    with running_balancer("--log-level", "debug") as balancer:
        printed = _output("balanced", tmp_path, EVENKEEL_BALANCER=balancer.address)
        assert balancer.log.count('"outcome": "BALANCED"') >= 5, balancer.log
    assert printed == PRINTED["balanced"]


def test_the_code_is_that_of_the_programs() -> None:
    programs = [path.read_text(encoding="utf-8") for path in (ROOT / "examples/tutorial").glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 7
    assert [block for block in blocks if not any(block in program for program in programs)] == []
