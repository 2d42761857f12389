"""What the builders here have in common: they write their files, or compare them with what they would write."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write(files: Mapping[Path, str], *, builder: str, check: bool) -> int:
    """Writes files, or compares them.

    Args:
        files: Their contents by path.
        builder: The program that writes them, as it is called.
        check: Only compare.

    Returns:
        The exit status: 1 if a file differs.
    """
    stale = []
    for path, text in files.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        print(f"{path} differs from what {builder} writes", file=sys.stderr)
    return 1 if stale else 0
