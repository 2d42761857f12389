"""What the batches of all ranks tell of keys and samples, whichever ranks have some."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import KeyTrace
from evenkeel.placement import InvalidInputError
from evenkeel.placement.plan_text import spans
from trainer_client.planning.collective import group_size, on_all
from trainer_client.planning.statistics import KeyStatistics

_DEPTH = 6
_BATCHES, _STEPS = 200, 16
"""To observe: batches of each rank that has some, and steps of all ranks of the job, at least."""
_REFERENCES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What batches told, the same on all ranks.

    Attributes:
        traces: Key statistics by table; none of tables whose features no batch has.
        samples: Samples of a batch on the rank with the largest ones; 0 where nothing told.
        fewest: Those of the largest batch on the rank where it is smallest.
        missing: Features of tables that no batch has.
        passed_over: Features of batches that belong to no table.
        notes: What was assumed, in sentences.
    """

    traces: Mapping[str, KeyTrace]
    samples: int = 0
    fewest: int = 0
    missing: frozenset[str] = frozenset()
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Own:
    """What one rank saw."""

    samples: int
    missing: frozenset[str]
    passed_over: frozenset[str]


def observe(
    model: nn.Module,
    batches: Iterable[Any] | KeyStatistics | None,
    *,
    ranks: int,
    most: int | None,
    group: dist.ProcessGroup | None,
) -> Observed:
    """Read the batches of all ranks that have some. Collective where there is a group.

    Args:
        model: The model before it is sharded.
        batches: Of this rank; or statistics that observed some.
        ranks: Ranks of the job that is planned.
        most: Most batches to read on a rank, if anything says so.
        group: The ranks; all by default.

    Raises:
        InvalidInputError: If ranks have no batch where they bring batches, or no `KeyedJaggedTensor` is in one. All
            ranks raise it alike.
        RuntimeError: If a batch could not be read, on another rank; there it is what the batches raised.
    """
    brings = on_all(lambda: batches is not None, group)
    bringing = tuple(rank for rank, brought in enumerate(brings) if brought)
    if not bringing:
        return Observed(traces={})
    count = max(_BATCHES, -(-_STEPS * ranks // len(bringing))) if most is None else most
    # A `KeyStatistics` leaves room for one of every rank, and those that bring nothing need none.
    room = _REFERENCES * group_size(None) // len(bringing)
    kept: list[KeyStatistics] = []

    def own() -> _Own:
        if isinstance(batches, KeyStatistics):
            kept.append(batches)
            samples = batches.samples_per_step()
        else:
            kept.append(KeyStatistics(model, max_references=room))
            samples = 0 if batches is None else _read(kept[0], batches, count)
        return _Own(samples, *kept[0].unmatched_features())

    seen = [one for one, brought in zip(on_all(own, group), brings, strict=True) if brought]
    notes: tuple[str, ...] = ()
    if len(bringing) < len(brings):
        named = f"rank{'s' * (len(bringing) > 1)} {spans(bringing)}"
        notes += (f"batches are those of {named} of {len(brings)}: the others gave none",)
    return Observed(
        traces=kept[0].gather(group),
        samples=max(one.samples for one in seen),
        fewest=min(one.samples for one in seen),
        missing=frozenset.intersection(*(one.missing for one in seen)),
        passed_over=tuple(sorted(frozenset.union(*(one.passed_over for one in seen)))),
        notes=notes,
    )


def _read(statistics: KeyStatistics, batches: Iterable[Any], most: int) -> int:
    """Gives batches to `statistics`; the samples of the largest one."""
    samples = 0
    for batch in itertools.islice(batches, most):
        found = list(_keyed_jagged(batch, _DEPTH))
        if not found:
            remedy = "give batches that hold one, or statistics: KeyStatistics, ids_per_sample and access"
            raise InvalidInputError("batches", type(batch).__name__, "holds no KeyedJaggedTensor", remedy)
        statistics.observe(*found)
        samples = max(samples, *(int(keys.stride()) for keys in found))
    if not samples:
        raise InvalidInputError("batches", 0, "has no batch", "give some hundred, or none at all")
    return samples


def _keyed_jagged(value: Any, depth: int) -> Iterator[Any]:
    """Every `KeyedJaggedTensor` in a batch, through containers, dataclasses and plain objects."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if isinstance(value, KeyedJaggedTensor):
        yield value
        return
    if depth == 0 or isinstance(value, torch.Tensor | str | bytes):
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _keyed_jagged(part, depth - 1)
