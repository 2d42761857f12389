"""What optimizers keep about a table: arrays with a row for each of its rows, and single numbers.

What is row and what is number is read off the optimizer itself: another one of its kind and options takes a step on two
small tables of different sizes. That also shows how it wants each to be stored (a fused Adam has its step count on the
device, a plain one on the host), and what it gives to a row that has never had a gradient.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_client.embedding.checkpoint.record import CheckpointError, TableRecord, torch_dtype

PREFIX = "optimizer."
"""Of the names of its arrays in a checkpoint."""
Optimizers = Optimizer | Sequence[Optimizer] | None


def owner_of(optimizers: Optimizers, weight: nn.Parameter, table: str) -> Optimizer | None:
    """The optimizer that trains a table; None if none is given, or none need be because the table is frozen.

    Raises:
        CheckpointError: If optimizers are given, and none has the table.
    """
    given: Iterable[Optimizer] = [optimizers] if isinstance(optimizers, Optimizer) else optimizers or []
    for optimizer in given:
        if any(weight is held for group in optimizer.param_groups for held in group["params"]):
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
        """Finds out by trying, or from a checkpoint's record where the optimizer cannot be made anew.

        Raises:
            CheckpointError: If it keeps something that is neither, so that no other routing could take it over.
        """
        name = type(optimizer).__name__
        now = dict(optimizer.state.get(weight, {}))
        trials = [_try(optimizer, weight, rows) for rows in (2, 3)]
        rebuilt = [trial for trial in trials if trial is not None]
        # What only training brings, or the whole state of an optimizer that cannot be made anew, is taken as it is.
        states = [now | trial for trial in rebuilt] if len(rebuilt) == 2 else [now, now]
        if len(rebuilt) < 2:
            _add_recorded(states, record, weight, optimizer)
        rows, numbers = {}, {}
        for key, value in states[0].items():
            if value is None:
                continue
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
                numbers[key] = value
            elif _by_rows(
                [state[key] for state in states], [2, 3] if key in (trials[0] or {}) else [weight.shape[0]] * 2
            ):
                rows[key] = value[:1].detach().clone()
            else:
                raise CheckpointError(
                    f"table {table}: {name} keeps {key} for all of its rows together, which no other routing or number "
                    "of ranks could take over; save without `optimizer`, or train the tables with another optimizer"
                )
        return cls(name=name, rows=rows, numbers=numbers)

    @property
    def names(self) -> set[str]:
        """All that it keeps."""
        return {*self.rows, *self.numbers}


def _try(optimizer: Optimizer, weight: nn.Parameter, rows: int) -> dict[str, Any] | None:
    """State after one step without gradients on a table of a few rows; None if the optimizer cannot be made anew."""
    kind = type(optimizer)
    group = next(g for g in optimizer.param_groups if any(weight is held for held in g["params"]))
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    zeros = torch.zeros(rows, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    small = nn.Parameter(zeros, requires_grad=False)  # so that a differentiable step writes to it too
    small.grad = torch.zeros_like(small)
    try:
        accepted = inspect.signature(kind).parameters
        other: Any = kind([small], **{name: value for name, value in options.items() if name in accepted})
        other.param_groups[0].update(options)
        other._warned_capturable_if_run_uncaptured = True  # it is a trial: a warning would mislead
        with torch.no_grad():
            other.step()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
        return None
    return dict(other.state[small])


def _add_recorded(
    states: list[dict[str, Any]], record: TableRecord | None, weight: Tensor, optimizer: Optimizer
) -> None:
    """Adds examples of what a checkpoint has, stored as PyTorch's own optimizers would store it."""
    if record is None or states[0]:
        return
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    number = torch.zeros((), device=weight.device if on_device else "cpu")
    rows = {
        name.removeprefix(PREFIX): weight.new_zeros(weight.shape[0], *spec.shape, dtype=torch_dtype(spec.dtype))
        for name, spec in record.arrays.items()
        if name.startswith(PREFIX)
    }
    for state in states:
        state.update(rows | dict.fromkeys(record.scalars, number))


def _by_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(isinstance(v, Tensor) and v.dim() > 0 and v.shape[0] == n for v, n in zip(values, sizes, strict=True))


def read_state(layout: Layout, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Arrays under their names in a checkpoint, and numbers, of what an optimizer holds of a table."""
    rows = {PREFIX + name: state[name] for name in layout.rows if isinstance(state.get(name), Tensor)}
    return rows, {name: float(state[name]) for name in layout.numbers if state.get(name) is not None}


def check_state(layout: Layout, record: TableRecord, where: object) -> None:
    """Checks that an optimizer can go on with the state of a checkpoint.

    Raises:
        CheckpointError: If the checkpoint has none, or that of another kind.
    """
    saved = {name.removeprefix(PREFIX) for name in record.arrays if name.startswith(PREFIX)} | record.scalars.keys()
    if not saved and not record.optimizer and layout.names:
        raise CheckpointError(
            f"{where}: table {record.name} was saved without optimizer state; leave `optimizer` out, and it begins anew"
        )
    if saved and saved != layout.names:
        raise CheckpointError(
            f"{where}: table {record.name} was saved with the optimizer state {', '.join(sorted(saved))}"
            f"{f' of {record.optimizer}' if record.optimizer else ''}, and this {layout.name} keeps "
            f"{', '.join(sorted(layout.names)) or 'none'}; give an optimizer with the same options, or leave "
            "`optimizer` out to begin anew"
        )


def prepare_state(optimizer: Optimizer, layout: Layout, weight: nn.Parameter, record: TableRecord) -> dict[str, Tensor]:
    """Gives an optimizer the state of a table on which no row is filled yet.

    Rows are as those that had no gradient until the checkpoint was saved, so that a key that comes later finds what it
    would have found without an interruption.

    Returns:
        The arrays to fill, by their names in the checkpoint.
    """
    begun = any(name.startswith(PREFIX) for name in record.arrays) or bool(record.scalars)
    optimizer.state.pop(weight, None)
    if not begun:
        if type(optimizer) is torch.optim.Adagrad:  # the one that keeps state before its first step
            rows = {name: _spread(row, weight) for name, row in layout.rows.items()}
            optimizer.state[weight] = rows | {name: torch.zeros_like(value) for name, value in layout.numbers.items()}
        return {}
    arrays: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for name, row in layout.rows.items():
        fresh = record.fresh.get(PREFIX + name)
        if fresh is not None:
            row = torch.tensor(fresh, dtype=torch.float64, device="cpu").to(row.device, row.dtype).view(row.shape)  # noqa: PLW2901
        arrays[PREFIX + name] = state[name] = _spread(row, weight)
    for name, example in layout.numbers.items():
        value = record.scalars[name]
        state[name] = torch.full_like(example, value) if isinstance(example, Tensor) else type(example)(value)
    optimizer.state[weight] = state
    return arrays


def _spread(row: Tensor, weight: Tensor) -> Tensor:
    return row.expand(weight.shape[0], *row.shape[1:]).clone(memory_format=torch.contiguous_format)


def fresh_rows(arrays: Mapping[str, Tensor], num_held: int) -> dict[str, list[float]]:
    """State of a row that no key has taken yet, by array; empty if all rows are taken."""
    if any(array.shape[0] <= num_held for array in arrays.values()):
        return {}
    return {name: array[-1].double().flatten().tolist() for name, array in arrays.items()}
