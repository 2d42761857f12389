"""Tables of a model and their keys, as benchmarks of plans train them: of power laws, or of traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.key_files import numbered

SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tables of a model and their keys.

    Attributes:
        rows: Rows of each table.
        dims: Width of each.
        ids: Lookups of a sample of each.
        exponents: Of the power law of each table's keys.
        samples: Samples of a batch.
        traces: Keys that tables look up instead, in their order; tables take them in turn.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    ids: tuple[int, ...]
    exponents: tuple[float, ...]
    samples: int
    traces: tuple[npt.NDArray[Any], ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [f"t{index}" for index in range(len(self.rows))]


def job_of(tables: int, gib: float, samples: int) -> Job:
    """Few large tables and many small ones, as of click logs, `gib` of weights in all."""
    draw = np.random.default_rng(SEED + tables)
    weight = np.exp(draw.normal(0, 2.0, tables))
    dims = draw.choice([32, 64, 128], tables)
    rows = np.maximum(1_000, weight / (weight * dims * 4).sum() * gib * 2**30).astype(np.int64)
    ids = draw.choice([1, 1, 1, 2, 5, 20], tables)
    return Job(
        rows=tuple(rows.tolist()),
        dims=tuple(dims.tolist()),
        ids=tuple(ids.tolist()),
        exponents=tuple(draw.choice([0.7, 0.9, 1.05, 1.2], tables).tolist()),
        samples=samples,
    )


def traced_job(tables: int, samples: int, steps: int, traces: Sequence[npt.NDArray[Any]]) -> Job:
    """Tables with as many rows as their traces have keys, and as wide as those of `job_of`.

    Lookups of a sample are those of `job_of`, or fewer, so that a table does not come twice to the same place of its
    trace in so many steps; one at least.
    """
    drawn = job_of(tables, 1.0, samples)
    own = tuple(numbered(keys) for keys in traces)
    turns = [own[index % len(own)] for index in range(tables)]
    return Job(
        rows=tuple(int(keys.max()) + 1 for keys in turns),
        dims=drawn.dims,
        ids=tuple(max(1, min(ids, len(keys) // (steps * samples))) for ids, keys in zip(drawn.ids, turns, strict=True)),
        exponents=drawn.exponents,
        samples=samples,
        traces=own,
    )


def batches(job: Job, device: torch.device) -> Iterator[KeyedJaggedTensor]:
    """Batches without end."""
    names = [f"f_{name}" for name in job.names]
    lengths = torch.cat([torch.full((job.samples,), ids, device=device, dtype=torch.int32) for ids in job.ids])
    streams = _traced(job, device) if job.traces else _power_laws(job, device)
    for values in streams:
        yield KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=lengths)


def _power_laws(job: Job, device: torch.device) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(SEED)
    while True:
        values = []
        for rows, ids, exponent in zip(job.rows, job.ids, job.exponents, strict=True):
            uniform = torch.rand(job.samples * ids, generator=generator, dtype=torch.float64, device=device)
            power = 1 - exponent
            ranks = ((((rows + 1.0) ** power - 1) * uniform + 1) ** (1 / power)).to(torch.int64).clamp_(1, rows) - 1
            values.append(ranks * 2_654_435_761 % rows)
        yield values


def _traced(job: Job, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Tables of one trace begin at places evenly apart, each with the keys renamed by a permutation of its own.

    A table goes on from where it is, and from the beginning after the end.
    """
    draw, count = np.random.default_rng(SEED), len(job.traces)
    traces = [torch.from_numpy(keys).to(device) for keys in job.traces]
    renamed = [torch.from_numpy(draw.permutation(rows)).to(device) for rows in job.rows]
    at = []
    for index in range(len(job.rows)):
        sharing = len(range(index % count, len(job.rows), count))
        at.append(len(traces[index % count]) * (index // count) // sharing)
    while True:
        values = []
        for index, ids in enumerate(job.ids):
            trace, lookups = traces[index % count], job.samples * ids
            places = (at[index] + torch.arange(lookups, device=device)) % len(trace)
            values.append(renamed[index][trace[places]])
            at[index] = (at[index] + lookups) % len(trace)
        yield values
