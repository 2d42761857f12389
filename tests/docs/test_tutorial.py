"""Pages whose code is that of programs in examples/: it is theirs, and the tutorial shows what they print."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from benchmarks.harness import zygote
from benchmarks.harness.launched import environments

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/start/tutorial.md").read_text(encoding="utf-8")
RANKS = 2
PRINTED = dict(
    re.findall(r"```console\n\$ torchrun --nproc-per-node 2 -m examples\.tutorial\.(\w+)\n(.*?)```", TEXT, re.S)
)


def printed_by_ranks(module: str, folder: Path, **environment: str) -> str:
    """What rank 0 of two prints.

    Args:
        module: The program.
        folder: Where what the ranks print is kept.
        environment: Further variables.
    """
    variables = environments(RANKS, str(folder))
    ranks = [
        zygote.Program(
            module, output=folder / f"{rank}.out", errors=folder / f"{rank}.err",
            **variables(rank), **environment,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        codes = [rank.wait(90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * RANKS, "".join(path.read_text() for path in folder.glob("*.err"))
    return (folder / "0.out").read_text()


@pytest.mark.parametrize("program", ["plain", "balanced", "torchrec_plain", "torchrec_balanced"])
def test_each_program_prints_what_the_page_shows(program: str, tmp_path: Path) -> None:
    assert printed_by_ranks(f"examples.tutorial.{program}", tmp_path) == PRINTED[program]


@pytest.mark.parametrize(("page", "folder"), [("start/tutorial.md", "tutorial"), ("train/frameworks.md", "resume")])
def test_code_and_commands_are_those_of_the_programs(page: str, folder: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    programs = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples" / folder).glob("*.py"))
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "(Trainer)" not in block]
    assert len(blocks) > 5
    assert [block for block in blocks if not _is_in(block, programs)] == []
    for name in re.findall(rf"-m examples\.{folder}\.(\w+)", text):
        assert (ROOT / f"examples/{folder}/{name}.py").exists(), name


def _is_in(block: str, text: str) -> bool:
    """Whether it is, wherever it is indented and whatever lines are left blank."""
    block, text = (re.sub(r"\n\s*\n", "\n", one) for one in (block, text))
    return any(textwrap.indent(block, " " * indent) in text for indent in range(0, 28, 4))
