"""Work of modules in floating-point operations, from their arguments, without reading the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer_client.balancing.costs.sequences import ATTENTION_WITH_BACKWARD, MATMUL_WITH_BACKWARD
from trainer_client.checks import check_whole

# Dense bf16 TFLOP/s of the vendors' datasheets (SXM parts where there are several), the first match counts.
PEAK_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"GB300|B300", 2500.0),
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL", 835.0),
    (r"H20\b", 148.0),
    (r"H100|H200|GH200|H800", 989.0),
    (r"A100|A800", 312.0),
    (r"L40S", 362.0),
    (r"L40\b", 181.0),
    (r"L20\b", 119.5),
    (r"L4\b", 121.0),
    (r"A10G?\b", 125.0),
    (r"MI300X", 1307.0),
    (r"MI325X", 1307.0),
    (r"MI355X", 2500.0),
)


def peak_tflops(device: torch.device | str | None = None) -> float | None:
    """Dense bf16 peak of a device in TFLOP/s.

    Args:
        device: A device, or the name of one as the driver gives it, such as "NVIDIA H200"; default: the current GPU.

    Returns:
        The peak; None for a CPU or a GPU that is not known, whose MFU then is not told.
    """
    if isinstance(device, str) and not _is_device(device):
        name = device
    else:
        chosen = torch.device(device) if device is not None else torch.device("cuda")
        if chosen.type != "cuda" or not torch.cuda.is_available():
            return None
        name = torch.cuda.get_device_name(chosen)
    for pattern, peak in PEAK_BF16_TFLOPS:
        if re.search(rf"\b(?:{pattern})", name):
            return peak
    return None


def _is_device(text: str) -> bool:
    return re.fullmatch(r"(cpu|cuda|mps|xpu|meta)(:\d+)?", text) is not None


class Work(Protocol):
    """How much a call of a module computes."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Parameters that decide it; calls with the same tensors in one step are computed once."""
        ...

    def flops(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """FLOPs of the forward and of the backward pass.

        Args:
            arguments: The arguments of the call by the names of the module's parameters.

        Returns:
            (2,) float64 on the arguments' device; it is read later.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Causal attention over sequences of different lengths, and matrix products with each of their tokens.

    A history of h positions attends causally, each of c candidates to the history and to itself:

        pairs = h * (h + 1) / 2 + c * (h + 1),  FLOPs = 4 * heads * head_dim * Σ pairs + 2 * weights * tokens

    forward; the backward pass has five products for the two of attention, and two for each of the others.

    Attributes:
        num_heads: Heads.
        head_dim: Width of a head.
        weights: Elements of the weight matrices that each token is multiplied by; 0 for attention alone.
        offsets: Parameter that holds the (n + 1,) offsets of the sequences.
        candidates: Parameter that holds the (n,) candidates at the sequences' ends, or None if there are none.
    """

    num_heads: int
    head_dim: int
    weights: int = 0
    offsets: str = "offsets"
    candidates: str | None = None

    def __post_init__(self) -> None:
        check_whole(self, num_heads=1, head_dim=1, weights=0)

    @property
    def reads(self) -> tuple[str, ...]:
        """Parameters that decide it."""
        return (self.offsets, self.candidates) if self.candidates else (self.offsets,)

    def flops(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """FLOPs of the forward and of the backward pass of one call."""
        lengths = torch.diff(_named(arguments, self.offsets)).double()
        history = lengths if self.candidates is None else lengths - _named(arguments, self.candidates)
        pairs = history * (history + 1) / 2 + (lengths - history) * (history + 1)
        attention = 4.0 * self.num_heads * self.head_dim * pairs.sum()
        products = 2.0 * self.weights * lengths.sum()
        backward = (ATTENTION_WITH_BACKWARD - 1) * attention + (MATMUL_WITH_BACKWARD - 1) * products
        return torch.stack([attention + products, backward])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductWork:
    """Matrix products whose size grows with the rows of an argument.

    Attributes:
        weights: Elements of all weight matrices that each row is multiplied by.
        rows: Parameter that holds the rows: all of its dimensions but the last.
    """

    weights: int
    rows: str

    def __post_init__(self) -> None:
        check_whole(self, weights=1)

    @property
    def reads(self) -> tuple[str, ...]:
        """Parameters that decide it."""
        return (self.rows,)

    def flops(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """FLOPs of the forward and of the backward pass of one call."""
        value = _named(arguments, self.rows)
        forward = 2.0 * self.weights * value.shape[:-1].numel()
        return torch.tensor([forward, (MATMUL_WITH_BACKWARD - 1) * forward], dtype=torch.float64, device="cpu")


def _named(arguments: Mapping[str, Any], name: str) -> torch.Tensor:
    value = arguments.get(name)
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"called without a tensor {name!r}; its arguments are {', '.join(arguments)}: name the parameter that "
            "holds it, or other modules"
        )
    return value
