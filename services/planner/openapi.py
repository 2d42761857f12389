"""Writes the OpenAPI document to a file, or compares it with one.

python -m services.planner.openapi services/planner/openapi.json [--check]
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

from services.planner.app import create_app
from services.planner.settings import Settings


def main(arguments: list[str]) -> int:
    """Writes the document, or with `--check` tells whether the file is up to date."""
    path = Path(arguments[0])
    text = json.dumps(create_app(Settings()).openapi(), indent=1, sort_keys=True) + "\n"
    if "--check" not in arguments:
        path.write_text(text)
        return 0
    old = path.read_text() if path.is_file() else ""
    difference = list(difflib.unified_diff(old.splitlines(), text.splitlines(), str(path), "the service", lineterm=""))
    for line in difference[:100]:
        print(line)
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
