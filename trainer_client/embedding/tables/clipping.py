"""Clipping gradients by one norm on all ranks, where some parameters are sharded by rows."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer_client.embedding.tables.collection import RoutedEmbeddingCollection


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips the gradients of a model with routed tables, as `torch.nn.utils.clip_grad_norm_` clips those of others.

    PyTorch's own function would take the norm of the rows of each rank, which differ, and scale the gradients that
    ranks share by different factors. Here the norm is that of all rows of all ranks and of the other parameters; all
    ranks that share tables call this together.

    Args:
        model: A model that holds collections anywhere, under `DistributedDataParallel` or `fully_shard` or neither.
        max_norm: What the norm is brought down to.
        norm_type: Of the norm, `inf` included.
        error_if_nonfinite: Whether a norm that is no finite number is an error.

    Returns:
        The norm before, the same on all ranks.

    Raises:
        ValueError: If a part of the model is under `FullyShardedDataParallel`, whose shards only it can add up.
        RuntimeError: If the norm is not finite and `error_if_nonfinite` is set; on all ranks.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "the model is under FullyShardedDataParallel, which has a clip_grad_norm_ of its own for what it shards; "
            "clip the tables by value, or move to fully_shard"
        )
    collections = [module for module in model.modules() if isinstance(module, RoutedEmbeddingCollection)]
    sharded = {parameter for collection in collections for parameter in collection.parameters()}
    others = [p for p in model.parameters() if p.grad is not None and p not in sharded]
    device = next(p.device for p in model.parameters())
    infinite = math.isinf(norm_type)

    def power_of(parameters: Iterable[nn.Parameter]) -> Tensor:
        """What adds up over parameters and ranks: the sum of powers, or the largest where the norm is infinite."""
        total = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        total = total.full_tensor() if isinstance(total, DTensor) else total
        return total.to(device, torch.float32) ** (1 if infinite else norm_type)

    powers = []
    for collection in collections:
        powers.append(power_of(collection.parameters()))
        if collection.world_size > 1:
            operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(powers[-1], operation, group=collection.group)
    # Gradients of `fully_shard` are distributed tensors, which do not mix with others.
    kinds = [[p for p in others if isinstance(p.grad, DTensor) == distributed] for distributed in (True, False)]
    powers += [power_of(kind) for kind in kinds if kind]
    norm = torch.stack(powers).max() if infinite else torch.stack(powers).sum() ** (1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped"
        )
    for kind in (*kinds, list(sharded)):
        clip_grads_with_norm_(kind, max_norm, norm)
    return norm
