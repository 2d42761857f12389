"""Pages that show programs of examples/ and commands: the code is that of the programs, and both run."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.harness import zygote
from tests.examples.launched import environments
from trainer_client.cli import app
from trainer_client.planning import load_sharding_plan

ROOT = Path(__file__).parents[2]
RANKS = 2
PAGES = {
    "start/tutorial": "tutorial/*.py",
    "train/frameworks": "resume/*.py",
    "place/planning": "plan_*.py",
    "place/planner": "plan_*.py",
}
TEXTS = {page: (ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in PAGES}
TUTORIAL = "plain", "balanced", "torchrec_plain", "torchrec_balanced"


def run_ranks_of(module: str, folder: Path) -> str:
    """What rank 0 of two prints."""
    variables = environments(RANKS, str(folder))
    files = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(RANKS)]
    ranks = [
        zygote.Program(module, output=output, errors=errors, **variables(rank))
        for rank, (output, errors) in enumerate(files)
    ]
    try:
        codes = [rank.wait(90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * RANKS, "".join(errors.read_text() for _, errors in files)
    return files[0][0].read_text()


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_is_that_of_its_programs(page: str) -> None:
    programs = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob(PAGES[page]))
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[page], re.S)
    assert blocks
    others = ("(Trainer)", "load_sharding_plan")
    assert [block for block in blocks if not any(map(block.__contains__, others)) and not _is_in(block, programs)] == []
    for name in re.findall(r"-m (examples\.[\w.]+)", TEXTS[page]):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name


def _is_in(block: str, text: str) -> bool:
    """Whether it is, wherever it is indented and whatever lines are left blank."""
    block, text = (re.sub(r"\n\s*\n", "\n", one) for one in (block, text))
    return any(textwrap.indent(block, " " * indent) in text for indent in range(0, 28, 4))


@pytest.mark.parametrize("program", [*(f"tutorial.{name}" for name in TUTORIAL), "plan_dlrm"])
def test_each_program_prints_what_its_page_shows(program: str, tmp_path: Path) -> None:
    command = rf"```console\n\$ torchrun --nproc-per-node 2 -m examples\.{program}\n(.*?)```"
    (shown,) = re.findall(command, "".join(TEXTS.values()), re.S)
    assert run_ranks_of(f"examples.{program}", tmp_path).rstrip() == shown.rstrip()


def test_the_commands_of_planning_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXTS["place/planning"] + TEXTS["place/planner"]
    for language, file in (("yaml", "tables.yaml"), ("json", "job.json")):
        (tmp_path / file).write_text(re.findall(rf"```{language}\n(.*?)```", text, re.S)[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"```console\n\$ (evenkeel plan .*)\n(.*)", text)
    assert len(commands) == 5
    for command, shown in commands:
        if "--sharding-plan" in command:  # of the plan that the program leaves
            run_ranks_of("examples.plan_tables", tmp_path)
            assert load_sharding_plan("plan.json").plan["tables"]["item"].ranks
        result = CliRunner().invoke(app, shlex.split(command.partition(">")[0])[1:])
        assert result.exit_code == (3 if "Nothing fits" in shown else 0), result.output
