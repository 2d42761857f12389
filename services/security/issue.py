"""Draws a token: `python -m services.security.issue NAME --job PATTERN --file TOKENS --out TOKEN`.

The token goes to a file of its own or to standard output, once; its entry to the token file or to standard error.
"""

from __future__ import annotations

import argparse
import os
import secrets
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from services.security.tokens import SERVICES, hash_token, read_tokens

_TOKEN_BYTES = 32


def main(arguments: list[str]) -> int:
    """Returns 0, or 2 for arguments that cannot be used; then nothing was drawn or written."""
    parser = argparse.ArgumentParser(prog="python -m services.security.issue", description="Draws a bearer token.")
    parser.add_argument("name", help="whose token it is; seen in logs")
    parser.add_argument("--job", action="append", default=[], help="pattern of jobs that it is for; may be repeated")
    parser.add_argument("--service", action="append", choices=SERVICES, help="what it is for; default: all")
    parser.add_argument("--days", type=float, help="days until it expires; default: it does not")
    parser.add_argument(
        "--file", type=Path, help="token file to add the entry to; it and its folder are made if missing"
    )
    parser.add_argument(
        "--out", type=Path, help="file to write the token to, for its owner only; default: the terminal"
    )
    parser.add_argument(
        "--rotate",
        type=float,
        metavar="DAYS",
        help="replace a name's token: the new one is for the same jobs and services, the old one ends DAYS later",
    )
    options = parser.parse_args(arguments)
    try:
        token = _issue(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.out is None:
        print(token)
    return 0


def _issue(options: argparse.Namespace) -> str:
    if options.days is not None and not 0 < options.days < 36_525:
        raise ValueError(f"--days is {options.days:g}; pass a number above 0, at most a hundred years")
    if options.rotate is not None and not 0 <= options.rotate < 36_525:
        raise ValueError(f"--rotate is {options.rotate:g}; pass for how many days the old token still holds, 0 or more")
    if options.rotate is not None and options.file is None:
        raise ValueError("--rotate changes a token file; name it with --file")
    if options.out is not None and options.out.exists():
        raise ValueError(f"--out {options.out} is there already; remove it, or name another file")
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    entry: dict[str, Any] = {"name": options.name, "sha256": hash_token(token), "jobs": options.job}
    if options.service:
        entry["services"] = options.service
    if options.days is not None:
        expires = datetime.now(UTC) + timedelta(days=options.days)
        entry["expires"] = expires.isoformat(timespec="seconds")
    if options.out is not None:
        _write(options.out, f"{token}\n", "token")
    if options.file is None:
        print(yaml.safe_dump({"tokens": [entry]}, sort_keys=False), file=sys.stderr, end="")
        return token
    try:
        _add(options.file, entry, options.rotate)
    except ValueError:
        if options.out is not None:
            options.out.unlink()  # a token that no service knows
        raise
    return token


def _add(path: Path, entry: dict[str, Any], rotate: float | None) -> None:
    document: dict[str, Any] = {"tokens": []}
    same: list[tuple[dict[str, Any], datetime | None]] = []
    before = path.stat() if path.exists() else None
    if before is not None:
        known = read_tokens(path)  # refuses what a service would refuse
        document = yaml.safe_load(path.read_text())
        pairs = zip(document["tokens"], known, strict=True)
        same = [(old, identity.expires) for old, (_, identity) in pairs if identity.name == entry["name"]]
    if same and rotate is None:
        raise ValueError(
            f"{path} has a token named {entry['name']!r}; --rotate DAYS replaces it, or choose another name"
        )
    if rotate is not None:
        _retire(path, same, entry, rotate)
    document["tokens"].append(entry)
    _write(path, yaml.safe_dump(document, sort_keys=False), "token file", before)


def _retire(path: Path, same: list[tuple[dict[str, Any], datetime | None]], entry: dict[str, Any], days: float) -> None:
    """Lets earlier entries of the name end, and the new one be for what the latest of them was for."""
    if not same:
        raise ValueError(f"{path} has no token named {entry['name']!r} to replace; leave --rotate away")
    latest, _ = same[-1]
    for field in ("jobs", "services"):
        if not entry.get(field) and latest.get(field):
            entry[field] = latest[field]
    ends = datetime.now(UTC) + timedelta(days=days)
    for old, expires in same:
        if expires is None or expires > ends:
            old["expires"] = ends.isoformat(timespec="seconds")


def _write(path: Path, text: str, what: str, before: os.stat_result | None = None) -> None:
    """Puts a file in place at once, with the owner and mode of the one before; else for its owner only."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        part.touch(mode=0o600)
        part.write_text(text)
        if before is not None:  # the services' user could read it; it must be able to read what takes its place
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(part, before.st_uid, before.st_gid)
            part.chmod(stat.S_IMODE(before.st_mode))
        part.replace(path)
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
