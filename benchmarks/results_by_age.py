"""The result files by age: of which commit and machine each is, and how many commits are behind it.

python -m benchmarks.results_by_age
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import RESULTS, ROOT


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def row(name: str, provenance: dict[str, Any]) -> tuple[int, str, str, str, str]:
    """Commits behind, file, commit, date and machine; of a file without provenance, of the commit that wrote it."""
    path = f"benchmarks/results/{name}"
    commit = provenance.get("commit", "").partition("+")[0] or git("log", "-1", "--format=%h", "--", path)
    date = provenance.get("date") or git("log", "-1", "--format=%cs", "--", path)
    machine = provenance.get("machine", {})
    shown = ", ".join([*machine.get("gpus", ()), f"{machine['cores']} cores"]) if machine else "not written down"
    return int(git("rev-list", "--count", f"{commit}..HEAD") or 0), name, commit[:12], date[:10], shown


def main() -> None:
    table = Table("commits behind", "file", "commit", "date", "machine", title="Result files by age")
    rows = [row(path.name, json.loads(path.read_text()).get("provenance", {})) for path in RESULTS.glob("*.json")]
    for behind, *others in sorted(rows, reverse=True):
        table.add_row(str(behind), *others)
    Console().print(table)


if __name__ == "__main__":
    main()
