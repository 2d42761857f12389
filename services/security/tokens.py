"""Bearer tokens: a file that holds their hashes, read again whenever it changes."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from services.security.transport import Followed

SERVICES = ("balancer", "planner")
MAX_TOKEN_LENGTH = 512
_MAX_FILE_BYTES = 4 << 20
_KEYS = {"name", "sha256", "jobs", "services", "expires"}
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The holder of a token.

    Attributes:
        name: For logs and messages; never the token itself.
        jobs: Patterns (`*`, `?`, `[…]`) of the training jobs that it may join and read.
        services: The services that it may use: `balancer`, `planner`.
        expires: From when on the token is refused; None: never.
    """

    name: str
    jobs: tuple[str, ...] = ()
    services: tuple[str, ...] = ("balancer", "planner")
    expires: datetime | None = None

    def allows(self, job: str) -> bool:
        """Whether the holder may join and read this job."""
        return any(fnmatchcase(job, pattern) for pattern in self.jobs)


class AuthenticationError(Exception):
    """A call without a token that holds; the message may be shown to the caller."""


class TokenStore:
    """The tokens that a service knows.

    Tokens are random, so one round of SHA-256 keeps them; the file tells nobody how to get in. Rotation: add a second
    entry of the name, hand its token out, let the first one expire or take it away. A file that has become unreadable
    or wrong is reported and the tokens read before stay in force.
    """

    def __init__(
        self,
        path: Path,
        *,
        check_seconds: float = 1.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file.

        Args:
            path: The file.
            check_seconds: How often to look whether it has changed, at most.
            now: The time, against which tokens expire.
            clock: Seconds, for `check_seconds`.

        Raises:
            ValueError: If the file cannot be read or an entry is wrong; the message names the entry.
        """
        self._path = path
        self._now = now
        self._followed = Followed("token file", path, check_seconds=check_seconds, clock=clock)
        self._holders = dict(read_tokens(path))

    def _read(self) -> None:
        """While no other thread reads: none may put back what another has replaced."""
        self._holders = dict(read_tokens(self._path))

    def authenticate(self, authorization: str | None, service: str) -> Identity:
        """The holder of the token in an `Authorization` header.

        Args:
            authorization: The header's value; None if there is none.
            service: The service that is asked.

        Raises:
            AuthenticationError: If there is no token, or not one that holds here and now.
        """
        self._followed.load(self._read)
        if not authorization:
            raise AuthenticationError("no token: send 'authorization: Bearer TOKEN'")
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_LENGTH:
            raise AuthenticationError("malformed authorization: send 'authorization: Bearer TOKEN'")
        # A hash is looked up: how long that takes says nothing about tokens, of which nobody can choose the hash.
        identity = self._holders.get(hash_token(token))
        if identity is None:
            raise AuthenticationError("unknown token: it is wrong, or has been withdrawn")
        if identity.expires is not None and self._now() >= identity.expires:
            raise AuthenticationError(
                f"token {identity.name!r} expired at {identity.expires.isoformat()}: ask for a new one"
            )
        if service not in identity.services:
            raise AuthenticationError(
                f"token {identity.name!r} is for {', '.join(identity.services)}, not for the {service}"
            )
        return identity


def hash_token(token: str) -> str:
    """What the file holds in a token's place: the SHA-256 of its UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def read_tokens(path: Path) -> tuple[tuple[str, Identity], ...]:
    """The (hash, holder) pairs of a token file.

    Raises:
        ValueError: If the file cannot be read or an entry is wrong.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"token file {path} is larger than {_MAX_FILE_BYTES} bytes")
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # A parser's message may quote the line that it failed at.
        why = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise ValueError(f"token file {path} cannot be read: {why}") from None
    if not isinstance(document, dict) or set(document) != {"tokens"} or not isinstance(document["tokens"], list):
        raise ValueError(f"token file {path} must hold one list, 'tokens'")
    pairs = tuple(_read_entry(path, number, entry) for number, entry in enumerate(document["tokens"]))
    if len({digest for digest, _ in pairs}) < len(pairs):  # a name may have several: the old token and the new
        raise ValueError(f"token file {path}: two entries have the same sha256")
    return pairs


def _read_entry(path: Path, number: int, entry: Any) -> tuple[str, Identity]:
    where = f"token file {path}, entry {number}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is no mapping")
    unknown = sorted(str(key) for key in entry if key not in _KEYS)
    if unknown:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}; use {', '.join(sorted(_KEYS))}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name is missing")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ValueError(f"{where} ({name}): sha256 must be 64 lower-case hexadecimal digits, not the token itself")
    services = _names(where, "services", entry.get("services", list(SERVICES)))
    for service in services:
        if service not in SERVICES:
            raise ValueError(f"{where} ({name}): services holds {service!r}; use {', '.join(SERVICES)}")
    return digest, Identity(
        name=name,
        jobs=_names(where, "jobs", entry.get("jobs", [])),
        services=services,
        expires=_read_expiry(where, entry.get("expires")),
    )


def _names(where: str, field: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"{where}: {field} must be a list of names")
    return tuple(values)


def _read_expiry(where: str, value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        expires = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{where}: expires is {value!r}; use a time such as 2027-01-31T12:00:00+00:00") from None
    return expires.replace(tzinfo=UTC) if expires.tzinfo is None else expires
