"""What a rank has trained of its data, as plain values, and going on from there.

A state names the position in this rank's data before the first window that was not wholly yielded, and how many batches
of that window were. What was read ahead or is in flight is read, planned and moved again, and comes out the same: the
same ranks make the same plan of a window and skip the batches that are done.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.source import Position

VERSION = 2
REPEAT = (
    "from a state between windows, or with load_state_dict(…, repeat_window=True), which trains the whole window again"
)
_WINDOW = {"size": int, "done": int, "digest": str, "speeds": list, "plain": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a rank goes on from, as it says in the first round.

    Attributes:
        lines: What must be the same on all ranks, one readable line each.
        problem: Why this rank cannot go on; empty if it can.
        window: What is known of the window to go on in, see `LoaderState`; None at its beginning.
    """

    lines: tuple[str, ...] = ()
    problem: str = ""
    window: dict[str, Any] | None = None


def check_resumed(name: str, ranks: Sequence[Resumed | None]) -> None:
    """Checks that all ranks go on from one point, or the beginning (None); else says who cannot, or who differs."""
    for rank, one in enumerate(ranks):
        if one is not None and one.problem:
            raise ResumeError(f"rank {rank} cannot go on with the loader {name!r}: {one.problem}")
    lines = [("no state was loaded",) if one is None else one.lines for one in ranks]
    for rank, other in enumerate(lines):
        if other != lines[0]:
            first, second = ([line for line in a if line not in b] for a, b in ((lines[0], other), (other, lines[0])))
            raise ResumeError(
                f"ranks do not go on with the loader {name!r} from the same point: rank 0: {'; '.join(first)}; rank "
                f"{rank}: {'; '.join(second)}; load the states of one checkpoint, on all ranks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The state of a `BalancedLoader` on one rank.

    Attributes:
        name: The loader's name.
        rank: This rank of those that balance together.
        world_size: Number of ranks.
        epoch: Of this pass, as `set_epoch` named it; None if it did not.
        batches: That were yielded in this pass.
        finished: The pass is over; the next begins at the loader's own beginning.
        source: The wrapped loader's position before the first window that was not wholly yielded; None: its beginning.
        window: Of a window that was yielded in part, its `size` in batches, how many are `done`, and what its plan
            followed; None between two windows.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    epoch: int | None = None
    batches: int = 0
    finished: bool = False
    source: Position | None = None
    window: dict[str, Any] | None = None

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        state = {"version": VERSION, **{field.name: getattr(self, field.name) for field in fields(self)}}
        state["source"] = None if self.source is None else self.source.to_state()
        state["window"] = None if self.window is None else dict(self.window)
        return state

    @classmethod
    def from_state(cls, state: Any, name: str) -> LoaderState:
        """Reads what `to_state` wrote; `ResumeError` if it is not the state of this loader, or of another version."""
        if not isinstance(state, dict) or "version" not in state:
            given = f"a dict with the keys {[*state]}" if isinstance(state, dict) else type(state).__name__
            raise ResumeError(f"state is {given}, not what BalancedLoader.state_dict gave; load that")
        if state["version"] != VERSION:
            raise ResumeError(
                f"state['version'] is {state['version']!r}, and this release reads {VERSION}; go on with the release "
                "that wrote it, or from the beginning of an epoch"
            )
        if state.get("name") != name:
            raise ResumeError(
                f"state['name'] is {state.get('name')!r}, and this loader is {name!r}; load the state of the loader of "
                "this name, or name this one so (BalancedLoader(name=…))"
            )
        try:
            window = state["window"]
            if window is not None:
                window = {key: kind(window[key]) for key, kind in _WINDOW.items()}
                if not 0 < window["done"] < window["size"]:
                    raise ValueError(f"{window['done']} batches are done of a window of {window['size']}")
            return cls(
                name=name,
                rank=int(state["rank"]),
                world_size=int(state["world_size"]),
                epoch=None if state["epoch"] is None else int(state["epoch"]),
                batches=int(state["batches"]),
                finished=bool(state["finished"]),
                source=None if state["source"] is None else Position.from_state(state["source"]),
                window=window,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ResumeError(f"state is damaged ({error}); load what BalancedLoader.state_dict gave") from error

    def in_epoch(self, epoch: int) -> LoaderState | None:
        """What is gone on from after `set_epoch`: None in another epoch, which begins by itself.

        A pipeline sees the end of an epoch some steps before it has trained its last batch. So a pass may be over, and
        the loop that saved it still be in its epoch: there nothing is left of it.
        """
        source, stored = self.source, self.epoch
        if source is not None and stored is None and source.way == "sampler":
            stored = source.at["epoch"]
        if source is None or stored is None or (self.finished and stored != epoch):
            return self
        if self.finished:
            return replace(self, finished=False, source=replace(source, ended=True))
        return self if stored == epoch else None

    def repeating(self) -> LoaderState:
        """The state of the beginning of its window, which is trained again."""
        if self.window is None:
            return self
        return replace(self, window=None, batches=max(0, self.batches - int(self.window["done"])))

    @property
    def start(self) -> Position | None:
        """Where the loader begins its next iteration; None: as it does by itself.

        A loader with a state of its own also knows by it that its epoch is over. One that had batches left when the
        pass ended (`drop_last`) does not.
        """
        if not self.finished or self.source is None:
            return self.source
        return replace(self.source, ended=False) if self.source.way == "loader" and self.source.ended else None

    @property
    def resumed(self) -> Resumed | None:
        """What the first round tells of it; None where nothing had been trained."""
        if self.source is None and self.batches == 0:
            return None
        lines = [f"{self.batches} batches trained in this epoch", f"states of {self.world_size} ranks"]
        if self.epoch is not None:
            lines.append(f"epoch {self.epoch}")
        if self.finished:
            lines.append("the epoch was over")
        if self.window is not None:
            lines.append(f"within a window of {self.window['size']}, of which {self.window['done']} batches are done")
        if self.source is not None:
            lines.append(f"the loader's position is found by {self.source.way}")
            if self.source.way == "sampler":
                lines.append(f"the sampler at {dict(sorted(self.source.at.items()))}")
        return Resumed(lines=tuple(lines), window=self.window)


def state_for(
    state: object, loader: Any, *, name: str, rank: int, world_size: int, repeat_window: bool = False
) -> LoaderState:
    """What a rank goes on from; see `BalancedLoader.load_state_dict`.

    Raises:
        ResumeError: If that does not follow from the states.
    """
    given = [state] if isinstance(state, dict) else state
    if not isinstance(given, list | tuple) or not given:
        raise ResumeError(f"state is {state!r}; give this rank's state, or a list of those of all ranks")
    states = [LoaderState.from_state(one, name) for one in given]
    if repeat_window:
        states = [one.repeating() for one in states]
    first = states[0]
    if len(states) > 1:
        for number, one in enumerate(states):
            if (one.rank, one.world_size) != (number, len(states)):
                raise ResumeError(
                    f"states[{number}] is of rank {one.rank} of {one.world_size}; give the states of all "
                    f"{first.world_size} ranks of one checkpoint, in the order of the ranks"
                )
        check_resumed(name, [one.resumed for one in states])
    by_sampler = first.source is None or first.source.way == "sampler"
    if first.world_size == world_size:
        if len(states) == 1 and first.rank != rank and not by_sampler:
            raise ResumeError(
                f"state['rank'] is {first.rank}, and this is rank {rank}; load the state that this rank saved, or "
                "those of all ranks as a list; where one value is saved for all ranks, save JobState(loader)"
            )
        return replace(states[rank] if len(states) > 1 else first, rank=rank)
    other = f"state['world_size'] is {first.world_size}, and this job has {world_size}"
    if first.window is not None and not first.finished:
        raise ResumeError(
            f"{other}; the state was taken within a window, which only as many ranks can divide as before; go on "
            f"{REPEAT}"
        )
    first = replace(first, rank=rank, world_size=world_size)
    if first.finished or by_sampler:
        return first
    if first.source is not None and first.source.way == "loaders":
        return first  # nothing was read since: what was dealt out then is dealt out anew
    if len(states) < states[0].world_size:
        raise ResumeError(f"{other}; load the states of all {states[0].world_size} ranks as a list")
    if not hasattr(loader, "load_state_dicts"):
        raise ResumeError(
            f"{other}, for which the loader's data must be of the whole job: use "
            "trainer_client.balancing.sampling.GlobalBatchSampler, or give the loader load_state_dicts(states of all "
            "ranks)"
        )
    positions = [pickle.loads(one.source.at) for one in states if one.source is not None]
    return replace(first, source=Position("loaders", pickle.dumps(positions)))
