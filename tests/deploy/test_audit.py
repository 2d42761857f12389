"""Bills of materials and audits are judged: what is wrong is named, and silence of the database is not called clean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.scripts import script

BILL: dict[str, Any] = {
    "bomFormat": "CycloneDX",
    "components": [
        {"name": "Some_Package", "version": "1.0", "purl": "pkg:pypi/some-package@1.0", "bom-ref": "a"},
        {"name": "needed", "version": "2.0", "purl": "pkg:pypi/needed@2.0", "bom-ref": "b"},
    ],
    "dependencies": [{"ref": "a", "dependsOn": ["b"]}, {"ref": "b"}],
}


def test_a_right_bill() -> None:
    assert script("check_sbom").troubles_of(BILL, {"some-package": "1.0"}, {"needed": "2.0", "elsewhere": "3"}) == []


@pytest.mark.parametrize(
    ("wanted", "constraints", "trouble"),
    [
        ({"some-package": "1.0"}, {}, "needed 2.0 is not pinned: add it to requirements/services-constraints.txt"),
        ({"some-package": "1.1"}, {"needed": "2.0"}, "some-package is 1.0, pinned is 1.1"),
        ({"some-package": "1.0", "third": "1"}, {"needed": "2.0"}, "third is pinned and not listed"),
    ],
)
def test_pins_that_differ(wanted: dict[str, str], constraints: dict[str, str], trouble: str) -> None:
    assert script("check_sbom").troubles_of(BILL, wanted, constraints) == [trouble]


def test_bills_that_say_too_little() -> None:
    check, pins = script("check_sbom"), ({"some-package": "1.0"}, {"needed": "2.0"})
    assert check.troubles_of({}, *pins) == ["bomFormat is None, not CycloneDX"]
    lonely = BILL | {"dependencies": [{"ref": "a"}]}
    assert check.troubles_of(lonely, *pins) == ["needed has no dependencies listed"]


@pytest.mark.parametrize(
    ("dependencies", "status", "line"),
    [
        ([{"name": "x", "version": "1", "vulns": []}], 0, "balancer: 1 of 1 packages audited"),
        ([{"name": "x", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}], 1,
         "balancer: x 1 has PYSEC-1, fixed in 2"),
        ([{"name": "x", "skip_reason": "not found"}], 0,
         "balancer: NOT AUDITED, no advisory database is reached: not found"),
        ([{"name": "x", "skip_reason": "not found"}, {"name": "y", "version": "1", "vulns": []}], 0,
         "balancer: x not audited: not found"),
    ],
)  # fmt: skip
def test_verdicts(dependencies: list[dict[str, Any]], status: int, line: str) -> None:
    found, lines = script("check_audit").verdict("balancer", json.dumps({"dependencies": dependencies}), "")
    assert found == status
    assert line in lines


def test_an_auditor_that_gave_up_is_no_clean_audit() -> None:
    status, lines = script("check_audit").verdict("planner", "", "Traceback\nConnectionError: no route\n")
    assert status == 0
    assert lines == ["planner: NOT AUDITED, no advisory database is reached: ConnectionError: no route"]
