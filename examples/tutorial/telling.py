"""What the tutorial's programs print."""

from __future__ import annotations

import torch
import torch.distributed as dist


def tell(step: int, tokens: torch.Tensor, loss: torch.Tensor) -> None:
    """Prints each rank's tokens of a step, the largest over their mean, and the mean of the ranks' losses.

    Args:
        step: Number of the step.
        tokens: (samples,) lengths of this rank's histories.
        loss: This rank's.
    """
    counts = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, tokens.sum())
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        each, mean = [int(count) for count in counts], float(sum(counts)) / len(counts)
        shown = " ".join(f"{count:5}" for count in each)
        print(f"step {step}  tokens {shown}  largest/mean {max(each) / mean:.2f}  loss {float(total) / len(each):.3f}")
