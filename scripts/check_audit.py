"""Says what pip-audit found, and tells "nothing is known" from "nobody was asked".

python scripts/check_audit.py balancer report.json log.txt
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def verdict(service: str, report: str, log: str) -> tuple[int, list[str]]:
    """Exit status and lines to print.

    Args:
        service: Whose packages they are.
        report: That of pip-audit, as JSON; empty if it wrote none.
        log: What pip-audit printed.
    """
    packages = json.loads(report)["dependencies"] if report.strip() else []
    asked = [each for each in packages if "skip_reason" not in each]
    if not asked:
        why = (packages[0]["skip_reason"] if packages else (log.strip().splitlines() or ["no report"])[-1])[:200]
        return 0, [f"{service}: NOT AUDITED, no advisory database is reached: {why}"]
    lines = [
        f"{service}: {each['name']} {each['version']} has {found['id']}, fixed in {', '.join(found['fix_versions'])}"
        for each in asked
        for found in each["vulns"]
    ]
    lines += [f"{service}: {each['name']} not audited: {each['skip_reason']}" for each in packages if each not in asked]
    vulnerable = any(each["vulns"] for each in asked)
    return int(vulnerable), [*lines, f"{service}: {len(asked)} of {len(packages)} packages audited"]


def main(arguments: list[str]) -> int:
    """Returns 1 if a package has a known vulnerability, 2 without the three arguments."""
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    service, report, log = arguments[0], Path(arguments[1]), Path(arguments[2])
    status, lines = verdict(service, report.read_text() if report.exists() else "", log.read_text())
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
