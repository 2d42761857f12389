"""Follows a sample of the keys of several tables, step by step, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.key_statistics.kernels import sample, sketch, thin
from evenkeel.key_statistics.trace import ALL, KeyTrace, united
from evenkeel.placement.invalid_input import require

Array = npt.NDArray[Any]

_SKETCHES = 24
_REGISTERS = 4096
_LEAST_ROOM = 1 << 12


class KeySampler:
    """The keys of a sample, decided by a hash of the key, so that a key is followed in every step or never.

    While there is room all keys are followed. Where there is none left, the share of the tables that take the most of
    it is halved, and the keys that drop out are forgotten.

    Source: SHARDS with fixed size, Waldspurger et al., FAST 2015.
    """

    def __init__(self, tables: Sequence[str], *, max_references: int = 2_000_000) -> None:
        """Start empty.

        Args:
            tables: Names of the tables.
            max_references: References kept at most, of all tables together; 12 bytes each.

        Raises:
            InvalidInputError: If there is no table, or no room for a few thousand references a table.
        """
        require(len(tables) > 0, "tables", 0, "are none", "name at least one table")
        least = _LEAST_ROOM * len(tables)
        remedy = f"give at least {least}: {_LEAST_ROOM} a table"
        require(max_references >= least, "max_references", max_references, "is too small", remedy)
        self.tables = tuple(tables)
        self.max_references = max_references
        self.steps = 0
        self.samples = 0.0
        self.lookups = np.zeros(len(tables))
        self._limits = np.full(len(tables), ALL, dtype=np.uint64)
        self._hashes, self._counts = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32)
        self._used = 0
        self._segments, self._rows = np.zeros((1024, 3), dtype=np.int64), 0
        self._stamps, self._places = np.zeros(1 << 12, dtype=np.int64), np.zeros(1 << 12, dtype=np.int64)
        self._stamp = 0
        self._sketches: dict[int, Array] = {}
        self._stride = 1

    def observe(self, batches: Sequence[tuple[Array, Array]], samples: float) -> None:
        """Take the keys of one step.

        Args:
            batches: Keys, int64 or int32, and (runs, 3) int64 of table, first and last: the runs of keys that are of
                one table. Keys outside of all runs are passed over.
            samples: Samples of the step on this rank.
        """
        registers = self._sketch_of(self.steps)
        self._stamp += len(self.tables)
        size = 0
        for _, parts in batches:
            size += int((parts[:, 2] - parts[:, 1]).sum())
        self._make_room(size)
        for values, parts in batches:
            runs = np.concatenate([parts, np.zeros((len(parts), 1), dtype=np.int64)], axis=1)
            self._used = sample(
                values, runs, self._limits, np.int64(self._stamp), self._stamps, self._places, self._hashes,
                self._counts, np.int64(self._used),
            )  # fmt: skip
            if registers is not None:
                sketch(values, runs, np.uint64(self.steps), registers)
            self.lookups += np.bincount(runs[:, 0], weights=runs[:, 2] - runs[:, 1], minlength=len(self.tables))
            self._note(runs[runs[:, 3] > 0])
        self.steps += 1
        self.samples += samples

    def traces(self) -> dict[str, KeyTrace]:
        """What was seen, by name of the table."""
        rows = self._segments[: self._rows]
        step = np.repeat(rows[:, 0], rows[:, 2])
        owner = np.repeat(rows[:, 1], rows[:, 2])
        result = {}
        for index, name in enumerate(self.tables):
            own = np.flatnonzero(owner == index)
            parts = united(step[own], self._hashes[own], self._counts[own])
            result[name] = KeyTrace(
                steps=self.steps,
                samples=self.samples,
                lookups=float(self.lookups[index]),
                limit=int(self._limits[index]),
                step=parts[0],
                key=parts[1],
                times=parts[2],
                sketches={at: registers[index] for at, registers in self._sketches.items()},
            )
        return result

    def _sketch_of(self, step: int) -> Array | None:
        """The registers of all tables for this step if it is sketched; evenly spaced steps are."""
        if step % self._stride:
            return None
        if len(self._sketches) >= _SKETCHES:
            self._stride *= 2
            self._sketches = {at: own for at, own in self._sketches.items() if at % self._stride == 0}
            if step % self._stride:
                return None
        size = _REGISTERS if len(self.tables) <= 64 else _REGISTERS // 8
        self._sketches[step] = np.zeros((len(self.tables), size), dtype=np.uint8)
        return self._sketches[step]

    def _make_room(self, size: int) -> None:
        """For `size` more references, though few of them may be kept."""
        while self._used > self.max_references // 2 and self._used + size > self.max_references:
            rows = self._segments[: self._rows]
            held = np.bincount(rows[:, 1], weights=rows[:, 2], minlength=len(self.tables))
            self._limits[held >= held.max() / 2] //= np.uint64(2)
            self._used = thin(rows, self._limits, self._hashes, self._counts)
            kept = rows[rows[:, 2] > 0]
            self._rows = len(kept)
            self._segments[: self._rows] = kept
        if self._used + size > len(self._hashes):
            room = max(self._used + size, min(2 * len(self._hashes), self.max_references))
            for name in ("_hashes", "_counts"):
                old = getattr(self, name)
                fresh = np.zeros(room, dtype=old.dtype)
                fresh[: self._used] = old[: self._used]
                setattr(self, name, fresh)
        if 2 * size > len(self._stamps):
            cells = 1 << (2 * size - 1).bit_length()
            self._stamps, self._places = np.zeros(cells, dtype=np.int64), np.zeros(cells, dtype=np.int64)

    def _note(self, runs: Array) -> None:
        while self._rows + len(runs) > len(self._segments):
            self._segments = np.concatenate([self._segments, np.zeros_like(self._segments)])
        segments = self._segments[self._rows : self._rows + len(runs)]
        segments[:, 0], segments[:, 1:] = self.steps, runs[:, [0, 3]]
        self._rows += len(runs)
