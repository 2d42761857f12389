"""What keeps PyTorch's wrappers and optimizers off modules whose rows are other ones on every rank."""

import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

logger = logging.getLogger(__name__)


class RankLocal(nn.Module):
    """A module whose parameters and buffers, and those of all modules within it, are this rank's alone.

    Wherever it is nested, `DistributedDataParallel` neither compares, broadcasts nor averages them, and
    `fully_shard`, `FullyShardedDataParallel` and `replicate` do not manage them. An optimizer gets them from
    `model.parameters()` as it gets all others.
    """

    def __init__(self) -> None:
        super().__init__()
        _let_optimizers_take_both_kinds()


# Each of PyTorch's composable wrappers passes over a module that another one has registered itself on. As an attribute
# of the class this holds for copies and for modules that were unpickled.
setattr(RankLocal, REGISTRY_KEY, {"replicate": RegistryItem(), "fully_shard": RegistryItem()})


def local_modules(model: nn.Module) -> Iterator[tuple[str, RankLocal]]:
    """The outermost rank-local modules of a model, with each of their names."""
    within: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(outer) for outer in within):
            continue
        if isinstance(module, RankLocal):
            within.append(f"{name}." if name else "")
            yield name, module


def local_names(model: nn.Module) -> set[str]:
    """Names of all rank-local parameters and buffers of a model."""
    names = set()
    for prefix, module in local_modules(model):
        for members in (module.named_parameters, module.named_buffers):
            for name, _ in members(prefix=prefix, remove_duplicate=False):
                names |= {name, f".{name}"} if "." not in name else {name}  # DDP puts a dot before those of a root
    return names


def _leave_out_of(wrapper: type[DistributedDataParallel]) -> None:
    """Lets `DistributedDataParallel` leave out what is rank-local; it looks for names to ignore at the root only."""
    build = wrapper.__init__

    @functools.wraps(build)
    def build_without(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        names = local_names(module)
        if names:
            named: Any = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            ignore: Any = wrapper._set_params_and_buffers_to_ignore_for_model
            ignore(module, sorted(names.union(named)))
        build(self, module, *args, **kwargs)

    wrapper.__init__ = build_without  # type: ignore[method-assign]


_leave_out_of(DistributedDataParallel)


_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # and its groups then


@functools.cache
def _let_optimizers_take_both_kinds() -> None:
    """Makes optimizers go through a group parameter by parameter that holds tables beside `fully_shard`'s tensors.

    On GPUs PyTorch's optimizers take all parameters of a group in one call by default, and fail where some of them are
    distributed tensors and others are not.
    """

    def choose(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _checked.get(optimizer) == len(optimizer.param_groups):
            return
        _checked[optimizer] = len(optimizer.param_groups)
        for group in optimizer.param_groups:
            kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
            if len(kinds) == 2 and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = False
                logger.info(
                    "%s steps its parameters one by one, since one of its groups holds both tables and parameters "
                    "of fully_shard; give the tables a parameter group of their own to step each kind in one call",
                    type(optimizer).__name__,
                )

    register_optimizer_step_pre_hook(choose)
