"""Samples that can be told apart in every field, and batches of them in several layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.programs.language import BalancerPlan, LoaderPlan
from trainer_client import BatchSpec, TokenCost

KEYS = 53  # distinct keys of each table
_STEPS, _INDICES, _RANKS, _EPOCHS = 64, 64, 8, 256


def sample_id(loader: int, epoch: int, rank: int, step: int, index: int) -> int:
    """One number for where a sample was loaded; ascending in the order in which samples of a batch arrive."""
    return (((loader * _EPOCHS + epoch) * _RANKS + rank) * _STEPS + step) * _INDICES + index


def split_id(number: int) -> tuple[int, int, int, int, int]:
    """(loader, epoch, rank, step, index) of a sample."""
    number, index = divmod(number, _INDICES)
    number, step = divmod(number, _STEPS)
    number, rank = divmod(number, _RANKS)
    loader, epoch = divmod(number, _EPOCHS)
    return loader, epoch, rank, step, index


def counts_of(ids: torch.Tensor) -> torch.Tensor:
    """(n,) how many values each sample has: mostly few, now and then many, now and then none."""
    mixed = (ids * 2654435761 % 2**31) // 7
    return torch.where(mixed % 11 == 0, 30 + mixed % 23, mixed % 5)


def keys_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) counts and the values of the samples, one after another: keys of the tables."""
    counts = counts_of(ids)
    owners = ids.repeat_interleave(counts)
    within = torch.arange(owners.numel(), device=ids.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return counts, (owners * 31 + within * within * 7) % KEYS


def build_parts(
    ids: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, tagged: str, width: int
) -> dict[str, torch.Tensor]:
    """The batch of these items of samples; `tagged` are the parts that have a sample's tags."""
    lengths, totals = ends - begins, counts_of(ids)
    owners = ids.repeat_interleave(lengths)
    within = torch.arange(owners.numel(), device=ids.device) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    items = owners * _INDICES + within + begins.repeat_interleave(lengths)
    has_tags = {"last": ends == totals, "first": begins == 0}.get(tagged, torch.ones_like(ids, dtype=torch.bool))
    tags = torch.where(has_tags, ids % 3, 0)
    batch = {
        "id": ids, "count": lengths, "triple": 3 * lengths, "items": items,
        "codes": (items[:, None] * 3 + torch.arange(3, device=ids.device)).reshape(-1),
        "num_tags": tags, "tags": ids.repeat_interleave(tags),
    }  # fmt: skip
    return batch | ({"wide": _wide(ids, width)} if width else {})


def parts_of(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) each, the first item of each sequence, counted in its sample, and the one after the last."""
    lengths, items = batch["count"], batch["items"]
    firsts = (lengths.cumsum(0) - lengths).clamp(max=max(items.numel() - 1, 0))
    begins = torch.where(lengths > 0, items[firsts] % _INDICES, 0) if items.numel() else torch.zeros_like(lengths)
    return begins, begins + lengths


def _wide(ids: torch.Tensor, width: int) -> torch.Tensor:
    return (ids[:, None] * torch.arange(1, width + 1, device=ids.device)).double()


@dataclass
class Nested:
    """A batch as some define it."""

    id: torch.Tensor
    parts: list[Any]
    size: int


def build(layout: str, ids: torch.Tensor, width: int) -> Any:
    """The batch of samples; with a width, of rows of that many numbers in one field besides."""
    counts, values = keys_of(ids)
    wide = _wide(ids, width) if width else None
    batch: Any
    match layout:
        case "plain":
            batch = {"id": ids, "count": counts, "values": values}
        case "nested":
            inner = {"count": counts, "values": values.double() / 3}
            return Nested(
                id=ids, parts=[inner, None, (ids % 7).half(), *([] if wide is None else [wide])], size=len(ids)
            )
        case "dense":
            batch = {
                "id": ids,
                "matrix": ids[:, None, None] * torch.ones(2, 3, dtype=torch.int32, device=ids.device),
                "flag": ids % 3 == 0,
            }
        case "flat":
            labels = (ids.repeat_interleave(2) % 251).to(torch.uint8)
            batch = {"id": ids, "labels": labels, "temperature": torch.tensor(0.5)}
        case "jagged":
            from torchrec import JaggedTensor

            return (ids, JaggedTensor(values, lengths=counts), *([] if wide is None else [wide]))
        case "keyed":
            from torchrec import KeyedJaggedTensor

            twice = KeyedJaggedTensor(
                keys=["item", "shop"], values=torch.cat([values, values + 1]), lengths=torch.cat([counts, counts])
            )
            batch = {"id": ids, "features": twice}
        case "parted":
            return build_parts(ids, torch.zeros_like(ids), counts, "all", width)
        case _:
            raise AssertionError(layout)
    return batch if wide is None else batch | {"wide": wide}


SPECS = {
    "plain": BatchSpec(rows_per_sample={"values": "count"}),
    "nested": BatchSpec(rows_per_sample={"parts.0.values": "parts.0.count"}, batch_size=("size",)),
    "flat": BatchSpec(rows_per_sample={"labels": 2}, shared=("temperature",)),
    "parted": BatchSpec(
        sequence={"items": 1, "codes": 3}, rows_per_sample={"items": "count", "codes": "triple", "tags": "num_tags"}
    ),
}
_COUNTS = {"plain": "count", "parted": "count", "nested": "parts.0.count", "jagged": "1", "keyed": "features.item"}


def spec_of(plan: LoaderPlan, balancer: BalancerPlan) -> BatchSpec | None:
    """How a loader's batches are laid out."""
    spec = SPECS.get(plan.layout)
    if spec is None or not balancer.split or plan.layout != "parted":
        return spec
    return replace(spec, parts={"tags": balancer.split})


def ids_of(batch: Any) -> torch.Tensor:
    """(n,) which samples a batch holds."""
    if isinstance(batch, Nested):
        return batch.id
    found: torch.Tensor = batch[0] if isinstance(batch, tuple) else batch["id"]
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether two batches agree in every value, dtype and shape."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Nested):
        return equal([one.id, one.parts, one.size], [other.id, other.parts, other.size])
    if hasattr(one, "lengths"):  # TorchRec's
        return equal([one.values(), one.lengths()], [other.values(), other.lengths()])
    return bool(one == other)


def width_at(plan: LoaderPlan, step: int, window: int) -> int:
    """Numbers in a row of the field whose shape changes; the same for the batches of a window."""
    return 1 + step // window * 5 % 3 if plan.changing else 0


def make_batches(plan: LoaderPlan, number: int, rank: int, epoch: int, window: int) -> Iterator[Any]:
    """A rank's batches of an epoch, in order."""
    fails_at = plan.failure(epoch, rank) if plan.fails_in == "source" else None
    for step, size in enumerate(plan.sizes_in(epoch, rank)):
        if step == fails_at:
            raise UserError
        ids = torch.arange(size) + sample_id(number, epoch, rank, step, 0)
        yield build(plan.layout, ids, width_at(plan, step, window))


class UserError(Exception):
    """Raised and caught by programs."""


class Source:
    """What a loader wraps; each iteration is an epoch."""

    def __init__(self, plan: LoaderPlan, number: int, rank: int, window: int) -> None:
        self.epochs = 0
        self._make = partial(make_batches, plan, number, rank)
        self._window = window
        self._source = plan.source

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epochs = self.epochs, self.epochs + 1
        batches = self._make(epoch, self._window)
        if self._source == "generator":
            return batches
        if self._source == "workers":
            # Forked here, while streams of the program may have threads, as in any job that evaluates.
            # By name: processes that come from a fork server start others by it unless told.
            return iter(
                DataLoader(
                    list(batches),  # type: ignore[arg-type]
                    batch_size=None,
                    collate_fn=_as_it_is,
                    num_workers=1,
                    multiprocessing_context="fork",
                )
            )
        return iter(list(batches))


def _as_it_is(batch: Any) -> Any:
    return batch


def cost_of(plan: LoaderPlan) -> Callable[[Any], Any]:
    """The cost function of a loader."""
    if plan.cost == "tokens" and plan.layout in _COUNTS and not (plan.fails and plan.fails_in == "cost"):
        return TokenCost(tokens=_COUNTS[plan.layout], per_sample=1)
    if plan.fails and plan.fails_in == "cost":
        return partial(_failing_cost, plan)
    return partial(_cost, plan.cost)


def _failing_cost(plan: LoaderPlan, batch: Any) -> Any:
    ids = ids_of(batch)
    if len(ids):
        _, epoch, rank, step, _ = split_id(int(ids[0]))
        if step == plan.failure(epoch, rank):
            raise UserError
    return _cost(plan.cost, batch)


def _cost(kind: str, batch: Any) -> Any:
    counts = counts_of(ids_of(batch))
    square = counts * (counts + 3)
    match kind:
        case "float":
            return square.double() * 0.1
        case "bfloat16":
            return square.bfloat16()
        case "half":
            return square.half()
        case "zero":
            return torch.zeros_like(square)
        case "list":
            return [float(value) for value in square]
        case "huge":
            return square * 2**40
        case "bad":  # one of the samples, now and then
            return np.where(square.numpy() == 28, np.nan, square.numpy())
    return square


def memory_of(batch: Any) -> torch.Tensor:
    """(n,) what each sample takes, not whole numbers."""
    return counts_of(ids_of(batch)) * 1.3 + 0.7
