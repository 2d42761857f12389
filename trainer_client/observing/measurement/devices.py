"""Peak rates of GPUs, by name."""

from __future__ import annotations

import re

import torch

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
