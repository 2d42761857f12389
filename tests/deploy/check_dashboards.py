"""Dashboards against Grafana's published types (npm `@grafana/schema`), which is what Grafana itself is built with."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEMA, COMPILER = "@grafana/schema@13.2.3", "typescript@5.9.3"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))

# JSON holds the values of enumerations, where TypeScript wants their names.
LOOSE = """
import type { Dashboard, Panel, VariableModel } from '@grafana/schema';
type Loose<T> = 0 extends 1 & T ? T : T extends string ? `${T}` : T extends (infer U)[] ? Loose<U>[]
  : T extends object ? { [K in keyof T]: Loose<T[K]> } : T;
"""

TRIES, TIMEOUT_SECONDS = 2, 180

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.fail("npm is missing: install Node.js")
    folder = tmp_path_factory.mktemp("schema")
    (folder / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", SCHEMA, COMPILER]
    trouble = ""
    for _ in range(TRIES):
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            trouble = f"no answer in {TIMEOUT_SECONDS} s"
            continue
        if done.returncode == 0:
            return folder
        trouble = done.stderr[-500:]
        if "E404" in trouble or "ETARGET" in trouble:
            pytest.fail(f"{' '.join(command)}: {trouble}")
    # Nothing is wrong with the dashboards then; what says so must not depend on a registry's good day.
    pytest.skip(f"DASHBOARDS NOT CHECKED against Grafana's types, the npm registry is not reached: {trouble}")


def compile_(project: Path, content: dict[str, object]) -> str:
    parts = [
        f"export const dashboard: Loose<Dashboard> = {json.dumps(content)};",
        *(
            f"export const panel{number}: Loose<Panel> = {json.dumps(panel)};"
            for number, panel in enumerate(content["panels"])
        ),  # type: ignore[arg-type,var-annotated]
        *(
            f"export const variable{number}: Loose<VariableModel> = {json.dumps(variable)};"
            for number, variable in enumerate(content["templating"]["list"])
        ),
    ]  # type: ignore[index]
    text = LOOSE + "\n".join(parts) + "\n"
    (project / "check.ts").write_text(text)
    command = ["npx", "tsc", "--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module",
               "esnext", "check.ts"]  # fmt: skip
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_have_the_types_of_grafana(project: Path, path: Path) -> None:
    assert compile_(project, json.loads(path.read_text())) == ""
