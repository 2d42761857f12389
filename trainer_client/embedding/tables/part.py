"""What all parts of tables have in common: where they belong, and what state dicts may be loaded into them."""

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_client.embedding.tables.config import RoutedTable
from trainer_client.embedding.tables.wrappers import RankLocal

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
