"""Bills of materials and audits are judged: what is wrong is named, and silence of the database is not called clean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.check_audit import verdict
from scripts.check_sbom import troubles_of

BILL: dict[str, Any] = {
    "bomFormat": "CycloneDX",
    "components": [
        {"name": "Some_Package", "version": "1.0", "purl": "pkg:pypi/some-package@1.0", "bom-ref": "a"},
        {"name": "needed", "version": "2.0", "purl": "pkg:pypi/needed@2.0", "bom-ref": "b"},
    ],
    "dependencies": [{"ref": "a", "dependsOn": ["b"]}, {"ref": "b"}],
}
WANTED, PINS = {"some-package": "1.0"}, {"needed": "2.0"}
NOT_AUDITED = "planner: NOT AUDITED, no advisory database is reached: "


@pytest.mark.parametrize(
    ("bill", "wanted", "constraints", "troubles"),
    [
        (BILL, WANTED, PINS | {"elsewhere": "3"}, []),
        (BILL, WANTED, {}, ["needed 2.0 is not pinned: add it to requirements/services-constraints.txt"]),
        (BILL, {"some-package": "1.1"}, PINS, ["some-package is 1.0, pinned is 1.1"]),
        (BILL, WANTED | {"third": "1"}, PINS, ["third is pinned and not listed"]),
        ({}, WANTED, PINS, ["bomFormat is None, not CycloneDX"]),
        (BILL | {"dependencies": [{"ref": "a"}]}, WANTED, PINS, ["needed has no dependencies listed"]),
    ],
)
def test_bills(bill: dict[str, Any], wanted: dict[str, str], constraints: dict[str, str], troubles: list[str]) -> None:
    assert troubles_of(bill, wanted, constraints) == troubles


@pytest.mark.parametrize(
    ("dependencies", "status", "line"),
    [
        ([{"name": "x", "version": "1", "vulns": []}], 0, "planner: 1 of 1 packages audited"),
        ([{"name": "x", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}], 1,
         "planner: x 1 has PYSEC-1, fixed in 2"),
        ([{"name": "x", "skip_reason": "not found"}], 0, f"{NOT_AUDITED}not found"),
        ([{"name": "x", "skip_reason": "not found"}, {"name": "y", "version": "1", "vulns": []}], 0,
         "planner: x not audited: not found"),
        (None, 0, f"{NOT_AUDITED}ConnectionError: no route"),
    ],
)  # fmt: skip
def test_verdicts(dependencies: list[dict[str, Any]] | None, status: int, line: str) -> None:
    answer = "" if dependencies is None else json.dumps({"dependencies": dependencies})
    found, lines = verdict("planner", answer, "Traceback\nConnectionError: no route\n")
    assert found == status
    assert line in lines
