"""What batches must have in common to exchange samples: their fields, and the values that all samples share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_MOST_BYTES = 65536  # of a tensor that is looked into, as this is done for every batch
_MOST_SHOWN = 60

SharedValues = tuple[tuple[str, str], ...]
"""Path of each shared value, and what it is."""


@dataclass(frozen=True)
class Schema:
    """The fields of a batch: two batches of one schema can exchange samples.

    Containers do not belong to it: ranks may order the keys of their dicts differently.

    Attributes:
        lines: One readable line per field, sorted by path.
    """

    lines: tuple[str, ...]

    @cached_property
    def hash(self) -> bytes:
        """16 bytes that name the schema, the same in every process."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).digest()

    def diff(self, other: Schema, *, own: str = "this batch", others: str = "the other") -> str:
        """What differs, one line per difference, with the batches called `own` and `others`; "" if nothing does."""
        ours, theirs = ({line.partition(": ")[0]: line for line in schema.lines} for schema in (self, other))
        return "\n".join(
            f"{own} has {ours.get(path, f'no {path}')}; {others} has {theirs.get(path, f'no {path}')}"
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
        )


def remedy(lines: Sequence[str], others: Sequence[str]) -> str:
    """What to do about two ranks' fields that differ, given as lines of their schemas."""
    widths = re.compile(r"\[\d+(?=[\],].* rows per sample)")  # the first size of a row of a dense field
    here = {widths.sub("[", line): line for line in lines if widths.search(line)}
    for other in others:
        if other != (line := here.get(widths.sub("[", other), other)):
            return (
                f"if {line.rpartition(': ')[0]!r} is padded to the longest sample of its batch, declare it in "
                "BatchSpec.padded together with what says the lengths; else give all ranks rows of the same shape"
            )
    return "give all ranks batches of the same fields and dtypes"


# ---------------------------------------------------------------------------------- shared values


def describe(values: Iterable[tuple[str, Any]]) -> SharedValues:
    """What shared values are, alike on all ranks where these are equal; of what is on a device only the kind."""
    return tuple((path, _short(_canonical(value))) for path, value in values)


def digest(shared: SharedValues) -> int:
    """64 bits of it; 0: there are none."""
    return int(_hash(repr(shared).encode()), 16) if shared else 0


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… (digest {_hash(text.encode())})"


def _canonical(value: Any) -> str:
    """Equal values give equal texts; of other objects than plain ones only their type is known."""
    if isinstance(value, bool | np.bool_):
        return repr(bool(value))
    if isinstance(value, int | float | np.integer | np.floating):
        is_exact = isinstance(value, int | np.integer) and abs(int(value)) >= 2**53
        return repr(int(value) if is_exact else float(value))
    if value is None or isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_canonical(key)}: {_canonical(item)}' for key, item in value.items()))}}}"
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
        if not is_plain or not value.is_cpu:  # a rank's may have arrived on its device already
            return "Tensor"
        return _array(value.dtype, value.shape, bytes_of(value) if value.nbytes <= _MOST_BYTES else None)
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return _array(value.dtype, value.shape, value if value.nbytes <= _MOST_BYTES else None)
    return type(value).__qualname__


def _array(dtype: Any, shape: Sequence[int], values: NDArray[Any] | None) -> str:
    kind = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return kind if values is None or not values.size else f"{kind} of digest {_hash(values.tobytes())}"


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A copy of a tensor's values as bytes; a device is waited for."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy()
