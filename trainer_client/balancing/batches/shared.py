"""What shared values are, in few bytes, so that the ranks notice where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

_MOST_BYTES = 65536  # of a tensor that is looked into, as this is done for every batch
_MOST_SHOWN = 60

Said = tuple[tuple[str, str], ...]
"""Path of each shared value, and what it is."""


def describe(values: Iterable[tuple[str, Any]]) -> Said:
    """What shared values are, alike on all ranks where these are equal; of what is on a device only the kind."""
    return tuple((path, _short(_canonical(value))) for path, value in values)


def digest(shared: Said) -> int:
    """64 bits of it; 0: there are none."""
    return int.from_bytes(hashlib.blake2b(repr(shared).encode(), digest_size=8).digest(), "little") if shared else 0


def _short(text: str) -> str:
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}… (digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _canonical(value: Any) -> str:
    """Equal values give equal texts; of other objects than plain ones only their type is known."""
    if isinstance(value, bool | np.bool_):
        return repr(bool(value))
    if isinstance(value, int | np.integer):
        number = int(value)
        return repr(float(number)) if abs(number) < 2**53 else repr(number)
    if isinstance(value, float | np.floating):
        return repr(float(value))
    if value is None or isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_canonical(key)}: {_canonical(item)}' for key, item in value.items()))}}}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return _bytes(f"{value.dtype}{list(value.shape)}", value)
    return type(value).__qualname__


def _tensor(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return "Tensor"  # a rank's may have arrived on its device already
    if tensor.is_quantized or tensor.is_nested or tensor.numel() * tensor.itemsize > _MOST_BYTES:
        return kind
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return _bytes(kind, plain.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else kind


def _bytes(kind: str, array: Any) -> str:
    if array.nbytes > _MOST_BYTES:
        return kind
    return f"{kind} of digest {hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()}"
