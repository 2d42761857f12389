"""Ranks and ratios of shards together, from placements that there are, or nearly are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.incumbent import Incumbent, Modules, Placed
from evenkeel.placement.limits import Watch
from evenkeel.placement.packing import Shelves, improve_packing
from evenkeel.placement.ranks import Shards, loads

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TOLERABLE = 0.01
"""Gap that more attempts are not worth."""
_REPACKED = 3
_REPACKING = 0.5
"""Of the time that is left."""


class Repacking(Incumbent):
    """The best placement so far, and what becomes of it where shards may change their ranks and ratios."""

    def repack(self, enough: float) -> None:
        """Ranks and ratios together, from the best placements, from those that nearly fit, and from mere choices."""
        starts = sorted(self.starts, key=lambda placed: placed.seconds)[:_REPACKED]
        tries: list[tuple[Modules, Placed | None]] = [(placed.modules, placed) for placed in starts]
        nearly = sorted(self.nearly, key=lambda placed: placed.seconds)[:_REPACKED]
        tries += [(placed.modules, placed) for placed in nearly]
        tries += [(modules, None) for modules in self.unplaced[:_REPACKED]]
        watch = self.watch.part(_REPACKING)
        for turn, (modules, start) in enumerate(tries):
            if self.has(enough * (1 + (TOLERABLE if turn else 0))) or watch.is_over():
                return
            self._repack(modules, start, enough, watch)

    def _repack(self, modules: Modules, start: Placed | None, enough: float, watch: Watch) -> None:
        """Ranks and ratios of the shards that are on one rank; those cut by columns keep their ratio."""
        pieces = self.pieces(modules)
        narrow = np.flatnonzero(~pieces.wide)
        if not len(narrow):
            return
        time, use = self.rest(modules)
        at = {
            table: (number, row) for number, g in enumerate(self.problem.groups) for row, table in enumerate(g.tables)
        }
        taken = None
        if pieces.wide.any():
            if start is None:
                return
            held = [place for table in dict.fromkeys(pieces.owner.tolist()) for place in start.places[table]]
            wide = np.flatnonzero(pieces.wide)
            only = Shards(*(getattr(pieces, name)[wide] for name in ("owner", "seconds", "hbm", "host", "wide")))
            taken = loads(only, np.array(held, dtype=np.int64)[wide], self.machines)
        columns = [self._columns(*at[int(pieces.owner[item])], modules) for item in narrow]
        padded = np.zeros((3, len(narrow), max(map(len, columns))))
        padded[0] = np.inf
        for item, (piece, own) in enumerate(zip(narrow, columns, strict=True)):
            number, row = at[int(pieces.owner[piece])]
            padded[:, item, : len(own)] = self.whole[number][:, row, own]
        room = self.problem.budget - use
        machines = self.machines
        rooms = (float(room[0]), float(room[1]))
        shelves = Shelves(padded[0], padded[1], padded[2], machines.ranks, machines.local_ranks, *rooms, taken)
        if start is None:
            least = np.where(np.isfinite(padded[0]), padded[1], np.inf).min(axis=1)
            rank = _spread(least, machines.ranks)
        else:
            left = {table: list(places) for table, places in start.places.items()}
            rank = np.array([left[int(table)].pop(0) for table in pieces.owner[narrow]])
        packed = improve_packing(shelves, rank, enough - time, watch)
        if packed is None:
            return
        chosen = [mine.copy() for mine in modules]
        places: dict[int, tuple[int, ...]] = {} if start is None else dict(start.places)
        for table in dict.fromkeys(pieces.owner[narrow].tolist()):
            places[table] = ()
        for item, piece in enumerate(narrow):
            table = int(pieces.owner[piece])
            number, row = at[table]
            chosen[number][row] = columns[item][int(packed.option[item])]
            places[table] = (*places[table], int(packed.rank[item]))
        self.offer(tuple(chosen), places)

    def _columns(self, number: int, row: int, modules: Modules) -> IntArray:
        """The modules that a shard on one rank may change to without another opening."""
        group, mine = self.problem.groups[number], modules[number]
        now = group.modules[int(mine[row])].layout
        if now.pieces > 1:
            return mine[row : row + 1]
        opening_of = group.openings()[0]
        opened = set(opening_of[mine].tolist())
        fits = [m.layout == now and opening_of[i] in opened for i, m in enumerate(group.modules)]
        return np.flatnonzero(np.array(fits) & np.isfinite(group.time[row]))


def _spread(sizes: FloatArray, ranks: int) -> IntArray:
    """Ranks by size alone, largest first onto the emptiest."""
    rank, load = np.zeros(len(sizes), dtype=np.int64), np.zeros(ranks)
    for item in np.argsort(-sizes, kind="stable"):
        rank[item] = load.argmin()
        load[rank[item]] += sizes[item]
    return rank
