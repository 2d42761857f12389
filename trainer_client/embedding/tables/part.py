"""What all parts of tables have in common: where they belong, and what state dicts may be loaded into them.

Their parameters and buffers are other ones on every rank, inside wrappers that take them for copies.
"""

import functools
import json
import logging
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer_client.embedding.tables.config import RoutedTable

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


_RECORD = "_extra_state"
_REMEDY = (
    "a state dict holds the rows of one rank, and goes back to the same rank of as many under the same routing; save "
    "with trainer_client.embedding.checkpoint.save and load with checkpoint.load, under any routing and number of ranks"
)


def module_name(table: str, rank: int, world_size: int) -> str:
    """Name of a rank's part of a table in its collection.

    Each rank's is another one, so that what joins the state dicts of ranks keeps all rows, and none loads another's.
    """
    return f"{table.replace('.', '_')}_rank_{rank}_of_{world_size}"


def rows_of_other_ranks(table: RoutedTable, state_dict: Mapping[str, Any], prefix: str, local: str) -> str | None:
    """What is wrong with a state dict that has rows of a table, but not this rank's; None if nothing is."""
    if any(name.startswith(f"{prefix}{local}.") for name in state_dict):
        return None
    pattern = re.compile(re.escape(prefix + table.name.replace(".", "_")) + r"_rank_(\d+)_of_(\d+)\.")
    match = next((match for match in map(pattern.match, state_dict) if match), None)
    if match is None:
        return None
    here = local.rsplit("_rank_", 1)[1].replace("_of_", " of ")
    return (
        f"table {table.name}: the state dict holds the rows of rank {match[1]} of {match[2]}, and this is rank {here}; "
        f"{_REMEDY}"
    )


class TablePart(RankLocal):
    """One rank's part of a table."""

    def __init__(self, table: RoutedTable, rows: int, *, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__()
        self.table, self.rows, self.rank, self.world_size = table, rows, rank, world_size
        self.weight = nn.Parameter(torch.empty(rows, table.embedding_dim, dtype=table.dtype, device=device))

    def extra_repr(self) -> str:
        """The table in words."""
        return f"{self.table.name}, {self.table.resolved_routing}, rank {self.rank} of {self.world_size}"

    def check_weight(self) -> None:
        """Checks that no wrapper has taken the rows apart or put others in their place."""
        kind = type(self.weight).__name__ if hasattr(self.weight, "device_mesh") else tuple(self.weight.shape)
        if kind != (self.rows, self.table.embedding_dim):
            raise ValueError(
                f"table {self.table.name}: its weight has become {kind}, where this rank has rows of shape "
                f"{(self.rows, self.table.embedding_dim)}: a wrapper shares it out between ranks; tell the wrapper to "
                "ignore the collection's parameters"
            )

    def get_extra_state(self) -> Tensor:
        """What decides which keys and rows are here, as JSON text in bytes; a part of the state dict."""
        record = {
            "table": self.table.name,
            "routing": str(self.table.resolved_routing),
            "rank": self.rank,
            "world_size": self.world_size,
            "num_embeddings": self.table.num_embeddings,
        }
        return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Does nothing: what was recorded is compared before anything is loaded."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        problem = self._misfit(state_dict, prefix)
        if problem is not None:
            error_msgs.append(f"table {self.table.name}: {problem}")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _misfit(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Why the rows of a state dict, if it has any, cannot be loaded here; nothing is loaded then."""
        tensors: dict[str, Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        present = {name for name in (*tensors, _RECORD) if prefix + name in state_dict}
        if not present:
            return None
        missing = [name for name in (*tensors, _RECORD) if name not in present]
        if missing:
            return f"the state dict has {', '.join(sorted(present))}, but not {', '.join(missing)}; {_REMEDY}"
        local, saved = _read(self.get_extra_state()), _read(state_dict[prefix + _RECORD])
        other = {name: value for name, value in saved.items() if local.get(name) != value}
        if other or saved.keys() != local.keys():
            differ = ", ".join(f"{name} {value} (here {local.get(name)})" for name, value in other.items())
            return f"the state dict is of {differ or 'another release'}; {_REMEDY}"
        for name, tensor in tensors.items():
            shape = tuple(state_dict[prefix + name].shape)
            if shape != tuple(tensor.shape):
                return f"{name} has shape {shape} in the state dict and {tuple(tensor.shape)} here; {_REMEDY}"
        return None


def _read(record: Any) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(bytes(record.cpu().numpy()).decode())
    except (AttributeError, ValueError):
        return {"record": "that cannot be read"}
    return read
