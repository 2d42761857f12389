"""Modules whose parameters and buffers are other ones on every rank, inside wrappers that take them for copies."""

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.nn.parallel import DistributedDataParallel


class RankLocal(nn.Module):
    """A module whose parameters and buffers, and those of all modules within it, are this rank's own.

    Wherever it is nested, ``DistributedDataParallel`` neither compares, broadcasts nor averages them, and
    ``fully_shard``, ``FullyShardedDataParallel`` and ``replicate`` do not manage them. An optimizer gets them from
    ``model.parameters()`` as it gets all others.
    """


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
                names |= {name, f".{name}"} if "." not in name else {name}  # DDP puts a dot before a root's own
    return names


def _leave_out_of(wrapper: type[DistributedDataParallel]) -> None:
    """Lets ``DistributedDataParallel`` leave out what is rank-local; it looks for names to ignore at the root only."""
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
