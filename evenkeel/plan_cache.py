"""Plans that were made before, kept in a folder: the same question gets the same plan, at once.

A plan is found by the digest of all that it follows from: the request with the figures of its hardware profile, the
planner's code, and the libraries that compute it. Only plans that are proved are kept, which more time would not make
better, so none is ever stale or worse than a new one. What nobody asks for any more goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import evenkeel.placement
from evenkeel.placement import InvalidInputError, Plan, PlanRequest, SolverOptions, Status
from evenkeel.placement.fields import decode, encode
from evenkeel.placement.plan_file import PlanFile, dumps, loads

_PREFIX, _SUFFIX, _UNFINISHED = "evenkeel-", ".plan", ".part"
_LIBRARIES = ("numpy", "scipy", "highspy")
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCache:
    """Plans in a folder, for any number of processes at a time.

    A file is a line that seals the rest, and a plan file. The seal tells of a plan that was altered or cut short, not
    of one that somebody has sealed anew: who may write to the folder may say what is planned.

    Attributes:
        folder: Is made where it is not there.
        max_bytes: Bytes of all plans; those that were not asked for the longest give way.
    """

    folder: Path
    max_bytes: int = MAX_BYTES

    def plan(self, request: PlanRequest, make: Callable[[], Plan]) -> Plan:
        """The plan that is kept of a request, or the one that `make` gives, which is kept if it is proved optimal.

        A folder that cannot be read or written costs no plan: a `RuntimeWarning` says so.
        """
        solver = replace(request.solver, time_limit_s=SolverOptions().time_limit_s)
        whole = replace(request, hardware=request.profile, solver=solver)
        whole = decode(PlanRequest, encode(whole))  # 5 and 5.0 are the same
        path = self.folder / f"{_PREFIX}{_digest(whole)}{_SUFFIX}"
        try:
            if (kept := self._read(path, whole)) is not None:
                return kept
        except OSError as error:
            self._warn(error)
            return make()
        made = make()
        if made.status is Status.OPTIMAL:
            try:
                content = dumps(PlanFile(request=whole, plan=made)).encode()
                self._write(path, sealed(content))
            except OSError as error:
                self._warn(error)
        return made

    def _read(self, path: Path, request: PlanRequest) -> Plan | None:
        if not path.is_file():  # reading a pipe or a device may never end
            return None
        try:
            stored = path.read_bytes()
            _, _, content = stored.partition(b"\n")
            if stored != sealed(content):
                return None
            file = loads(content.decode())
        except (FileNotFoundError, UnicodeDecodeError, InvalidInputError):  # one that is no plan is written again
            return None
        if file.request != request:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return file.plan

    def _write(self, path: Path, content: bytes) -> None:
        if len(content) > self.max_bytes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=_PREFIX, suffix=_UNFINISHED)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self._trim()

    def _trim(self) -> None:
        """Removes the oldest beyond `max_bytes`; what another process removes meanwhile is gone as well.

        What processes have left unfinished that were ended counts, too.
        """
        files = []
        for path in self.folder.iterdir():
            if not (path.name.startswith(_PREFIX) and path.name.endswith((_SUFFIX, _UNFINISHED))):
                continue
            with contextlib.suppress(OSError):
                facts = path.stat()
                files.append((facts.st_mtime_ns, facts.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _warn(self, error: OSError) -> None:
        warnings.warn(f"plans are not kept in {self.folder}: {error}", RuntimeWarning, stacklevel=4)


def _digest(request: PlanRequest) -> str:
    text = json.dumps(encode(request), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{_VERSION}\n{text}".encode()).hexdigest()


def sealed(content: bytes) -> bytes:
    """What is written of a plan file: its digest, a line's end, and itself."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _version(folder: Path) -> str:
    """Digest of a planner's code, of the profiles beside it, and of the versions of the libraries that it uses."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    for name in _LIBRARIES:
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()


# Now: the files may be another version's by the time that a plan is asked for.
_VERSION = _version(Path(str(evenkeel.placement.__file__)).parent)
