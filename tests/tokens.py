"""Token files of services."""

from pathlib import Path
from typing import Any

import yaml

from services.security.tokens import hash_token


def known(token: str, *jobs: str, **more: Any) -> dict[str, Any]:
    """The entry of a token that holds for such jobs, of all where none is named."""
    return {"name": "team", "sha256": hash_token(token), "jobs": list(jobs or "*"), **more}


def write_tokens(path: Path, *entries: dict[str, Any]) -> Path:
    """Puts a file of these entries in the place of the one that is there."""
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump({"tokens": list(entries)}))
    return part.replace(path)
