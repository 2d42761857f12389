"""What optimizers keep about a table: arrays with a row for each of its rows, and single numbers.

What is row and what is number is read off the optimizer itself: another one of its kind and options takes a step on a
small table. That also shows how it wants each to be stored (a fused Adam has its step count on the device, a plain one
on the host), and what it gives to a row that has never had a gradient.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_client.embedding.checkpoint.record import CheckpointError, TableRecord

PREFIX = "optimizer."  # of the names of its arrays in a checkpoint
Optimizers = Optimizer | Sequence[Optimizer] | None


def _group_of(optimizer: Optimizer, weight: nn.Parameter) -> dict[str, Any] | None:
    groups = (group for group in optimizer.param_groups if any(weight is trained for trained in group["params"]))
    return next(groups, None)


def optimizer_of(optimizers: Optimizers, weight: nn.Parameter, table: str) -> Optimizer | None:
    """The optimizer that trains a table; None if none is given, or none need be because the table is frozen."""
    given: Iterable[Optimizer] = [optimizers] if isinstance(optimizers, Optimizer) else optimizers or []
    for optimizer in given:
        if _group_of(optimizer, weight) is not None:
            return optimizer
    if given and weight.requires_grad:
        raise CheckpointError(
            f"table {table}: the optimizer given does not hold its rows; give the one that was made with the "
            "parameters of this collection, not of a copy, or several as a list, or leave `optimizer` out"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an optimizer stores what it keeps about a table.

    Attributes:
        name: Of the optimizer's class.
        rows: One row of each array that has a row for each of the table's, as it is before the first gradient.
        numbers: Each single number, a tensor or not, as an example.
    """

    name: str
    rows: dict[str, Tensor]
    numbers: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, weight: nn.Parameter, table: str, record: TableRecord | None = None) -> "Layout":
        """Finds out by trying, or from a checkpoint's record where the optimizer cannot be made anew."""
        num_rows, few = weight.shape[0], weight.shape[1] + 2  # no statistic over columns is as long
        trial = _try(optimizer, weight, few)
        current = optimizer.state.get(weight) or ({} if trial is not None else _recorded(record, weight, optimizer))
        # What only training brings is taken as it is.
        examples = {name: (value, num_rows) for name, value in current.items()}
        examples |= {name: (value, few) for name, value in (trial or {}).items()}
        rows, numbers = {}, {}
        for name, (value, count) in examples.items():
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
                numbers[name] = value
            elif isinstance(value, Tensor) and value.shape[0] == count:
                rows[name] = value[:1].detach().clone()
            elif value is not None:
                raise CheckpointError(
                    f"table {table}: {type(optimizer).__name__} keeps {name} for all of its rows together, which no "
                    "other routing or number of ranks could take over; save without `optimizer`, or train the tables "
                    "with another optimizer"
                )
        return cls(name=type(optimizer).__name__, rows=rows, numbers=numbers)

    def read(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Arrays under their names in a checkpoint, and numbers, of what an optimizer holds of a table."""
        rows = {PREFIX + name: state[name] for name in self.rows if isinstance(state.get(name), Tensor)}
        return rows, {name: float(state[name]) for name in self.numbers if state.get(name) is not None}

    def check(self, record: TableRecord, where: object) -> None:
        """Refuses a checkpoint without the optimizer's state, or with that of another kind."""
        saved, expected = _saved_rows(record) | record.scalars.keys(), {*self.rows, *self.numbers}
        if not saved and not record.optimizer and expected:
            raise CheckpointError(
                f"{where}: table {record.name} was saved without optimizer state; leave `optimizer` out, and it begins "
                "anew"
            )
        if saved and saved != expected:
            raise CheckpointError(
                f"{where}: table {record.name} was saved with the optimizer state {', '.join(sorted(saved))}"
                f"{f' of {record.optimizer}' if record.optimizer else ''}, and this {self.name} keeps "
                f"{', '.join(sorted(expected)) or 'none'}; give an optimizer with the same options, or leave "
                "`optimizer` out to begin anew"
            )

    def prepare(self, optimizer: Optimizer, weight: nn.Parameter, record: TableRecord) -> dict[str, Tensor]:
        """Gives an optimizer the state of a table on which no row is filled yet; returns the arrays to fill, by name.

        Rows are as those that had no gradient until the checkpoint was saved, so that a key that comes later finds what
        it would have found without an interruption.
        """
        optimizer.state.pop(weight, None)
        saved = bool(record.scalars or _saved_rows(record))
        if not saved and type(optimizer) is not torch.optim.Adagrad:  # which keeps state before its first step
            return {}
        rows, numbers = {}, {}
        for name, row in self.rows.items():
            fresh = record.fresh.get(PREFIX + name)
            first = row if fresh is None else row.new_tensor(fresh).view(row.shape)
            spread = first.expand(weight.shape[0], *row.shape[1:])
            rows[name] = spread.clone(memory_format=torch.contiguous_format)
        for name, example in self.numbers.items():
            value = record.scalars.get(name, 0.0)
            numbers[name] = torch.full_like(example, value) if isinstance(example, Tensor) else type(example)(value)
        optimizer.state[weight] = rows | numbers
        return {PREFIX + name: array for name, array in rows.items()} if saved else {}


def _saved_rows(record: TableRecord) -> set[str]:
    return {name.removeprefix(PREFIX) for name in record.arrays if name.startswith(PREFIX)}


def _try(optimizer: Optimizer, weight: nn.Parameter, rows: int) -> dict[str, Any] | None:
    """State after one step without gradients on a table of a few rows; None if the optimizer cannot be made anew."""
    group = _group_of(optimizer, weight) or {}
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    zeros = torch.zeros(rows, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    small = nn.Parameter(zeros, requires_grad=False)  # so that a differentiable step writes to it too
    small.grad = torch.zeros_like(small)
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        other: Any = type(optimizer)([small], **{name: value for name, value in options.items() if name in accepted})
        other.param_groups[0].update(options)
        other._warned_capturable_if_run_uncaptured = True  # it is a trial: a warning would mislead
        with torch.no_grad():
            other.step()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        return None
    return dict(other.state[small])


def _recorded(record: TableRecord | None, weight: Tensor, optimizer: Optimizer) -> dict[str, Any]:
    """Examples of what a checkpoint has, stored as PyTorch's own optimizers would store it."""
    if record is None:
        return {}
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    number = torch.zeros((), device=weight.device if on_device else "cpu")
    arrays = {name: record.arrays[PREFIX + name] for name in _saved_rows(record)}
    rows = {name: spec.empty(weight.shape[0]).zero_().to(weight.device) for name, spec in arrays.items()}
    return rows | dict.fromkeys(record.scalars, number)
