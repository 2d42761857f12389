"""What a rank has trained of its data, as plain values, and going on from there.

A state names where in its data a rank was before the first window that was not wholly yielded, and how much of that
window was. What was read ahead or is in flight is read, planned and moved again, and comes out the same: the same ranks
make the same plan of a window and skip what is done of it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.places import Place

if TYPE_CHECKING:
    from trainer_client.balancing.batches.structure import Schema

VERSION = 2
_CANNOT = 1  # the token of a rank that cannot go on; others are larger
_WINDOW = {"size": int, "last": bool, "digest": str, "speeds": list, "plain": bool, "left": list}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a rank goes on from, as it says in the first round.

    Attributes:
        lines: What must be the same on all ranks, one readable line each.
        problem: Why this rank cannot go on; empty if it can.
        window: What is known of the window to go on in; None at its beginning.
        fields: Of the batches to come, as `Schema.constant_lines`; empty where they are unknown.
    """

    lines: tuple[str, ...] = ()
    problem: str = ""
    window: dict[str, Any] | None = None
    fields: tuple[str, ...] = ()

    @property
    def token(self) -> int:
        """64 bits that are the same on ranks that go on from the same point."""
        if self.problem:
            return _CANNOT
        digest = hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).digest()
        return max(_CANNOT + 1, int.from_bytes(digest, "little"))

    def checked(self, num_samples: int, window: int, schema: Schema) -> Resumed:
        """With a problem, if the job's windows or batches are not those of before.

        Args:
            num_samples: Of the first round.
            window: Batches of a window in this job.
            schema: Of the batches; where there are no samples it says nothing.
        """
        problem = self.problem or (self._other_fields(schema) if num_samples else "")
        if not problem and self.window is not None and self.window["size"] != window:
            problem = (
                f"the state was taken within a window of {self.window['size']} batches, and this job has "
                f"window={window}; go on with BalanceOptions(window={self.window['size']}), from a state between "
                "windows, or with load_state_dict(…, repeat_window=True), which trains the whole window again"
            )
        return replace(self, problem=problem) if problem else self

    def _other_fields(self, schema: Schema) -> str:
        found = schema.constant_lines
        if not self.fields or found == self.fields:
            return ""
        before = "; ".join(line for line in self.fields if line not in found)
        now = "; ".join(line for line in found if line not in self.fields)
        had, have = f"its batches had {before} before", f"have {now} now"
        told = (f"{had}, and {have}" if now else f"{had}, and lack that now") if before else f"its batches {have}"
        return (
            f"{told}, unlike when the state was taken; go on with batches of the same fields and dtypes, or begin the "
            "epoch anew, without the state"
        )


def tokens_differ(tokens: Sequence[int]) -> bool:
    """Whether ranks go on from different points, or one cannot."""
    return _CANNOT in tokens or len(set(tokens)) > 1


def check_resumed(name: str, ranks: Sequence[Resumed | None]) -> None:
    """Checks that all ranks go on from one point.

    Raises:
        ResumeError: If one cannot, or they do not.
    """
    if tokens_differ([0 if one is None else one.token for one in ranks]):
        raise_differing(name, ranks)


def raise_differing(name: str, ranks: Sequence[Resumed | None]) -> NoReturn:
    """Raises the error that says which rank cannot go on, or how the first two differ.

    Args:
        name: The loader's name.
        ranks: What each rank goes on from; None: from the beginning.

    Raises:
        ResumeError: If it is called; it does nothing else.
    """
    for rank, one in enumerate(ranks):
        if one is not None and one.problem:
            raise ResumeError(f"rank {rank} cannot go on with the loader {name!r}: {one.problem}")
    lines = [one.lines if one is not None else ("no state was loaded",) for one in ranks]
    other = next((rank for rank, of_rank in enumerate(lines) if of_rank != lines[0]), 0)
    here = "; ".join(line for line in lines[0] if line not in lines[other])
    there = "; ".join(line for line in lines[other] if line not in lines[0])
    raise ResumeError(
        f"ranks do not go on with the loader {name!r} from the same point: rank 0: {here}; rank {other}: {there}; load "
        "the states of one checkpoint, on all ranks"
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
        source: Where the wrapped loader was before the first window that was not wholly yielded; None: at its
            beginning.
        window: What is known of that window if it was yielded in part.
        fields: Of that window's batches, as `Schema.constant_lines`; empty where this rank had no sample of it.
    """

    name: str
    rank: int
    world_size: int
    epoch: int | None = None
    batches: int = 0
    finished: bool = False
    source: Place | None = None
    window: dict[str, Any] | None = None
    fields: tuple[str, ...] = ()

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "version": VERSION, "name": self.name, "rank": self.rank, "world_size": self.world_size,
            "epoch": self.epoch, "batches": self.batches, "finished": self.finished,
            "source": None if self.source is None else self.source.to_state(),
            "window": None if self.window is None else dict(self.window),
            "fields": list(self.fields),
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Any, name: str) -> LoaderState:
        """Reads what `to_state` wrote.

        Raises:
            ResumeError: If it is not the state of this loader, or of another version.
        """
        if not isinstance(state, dict) or "version" not in state:
            raise ResumeError(f"state is {type(state).__name__}, not what BalancedLoader.state_dict gave; load that")
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
            return cls(
                name=name,
                rank=int(state["rank"]),
                world_size=int(state["world_size"]),
                epoch=None if state["epoch"] is None else int(state["epoch"]),
                batches=int(state["batches"]),
                finished=bool(state["finished"]),
                source=None if state["source"] is None else Place.from_state(state["source"]),
                window=None if window is None else {name: kind(window[name]) for name, kind in _WINDOW.items()},
                fields=tuple(map(str, state["fields"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ResumeError(f"state is damaged ({error}); load what BalancedLoader.state_dict gave") from error

    def in_epoch(self, epoch: int) -> LoaderState | None:
        """What is gone on from after `set_epoch`: None in another epoch, which begins by itself.

        A pipeline sees the end of an epoch some steps before it has trained its last batch. So a pass may be over, and
        the loop that saved it still be in its epoch: there nothing is left of it.
        """
        source, own = self.source, self.epoch
        if source is not None and own is None and source.way == "sampler":
            own = source.at["epoch"]
        if source is None or own is None or (self.finished and own != epoch):
            return self
        if self.finished:
            return replace(self, finished=False, source=replace(source, ended=True))
        return self if own == epoch else None

    def repeating(self) -> LoaderState:
        """The state of the beginning of its window, which is trained again."""
        if self.window is None:
            return self
        done = int(self.window["size"]) - len(self.window["left"])
        return replace(self, window=None, batches=max(0, self.batches - done))

    @property
    def start(self) -> Place | None:
        """Where the loader begins its next iteration; None: as it does by itself.

        A loader with a state of its own also knows by it that its epoch is over. One that had batches left when the
        pass ended (`drop_last`) does not.
        """
        if not self.finished or self.source is None:
            return self.source
        return replace(self.source, ended=False) if self.source.way == "loader" and self.source.ended else None

    @property
    def resumed(self) -> Resumed | None:
        """What votes tell of it; None where nothing had been trained."""
        if self.source is None and self.batches == 0:
            return None
        lines = [f"{self.batches} batches trained in this epoch", f"states of {self.world_size} ranks"]
        if self.epoch is not None:
            lines.append(f"epoch {self.epoch}")
        if self.finished:
            lines.append("the epoch was over")
        if self.window is not None:
            lines.append(
                f"within a window of {self.window['size']}, of which the batches {self.window['left']} are left"
            )
        if self.source is not None:
            lines.append(f"the loader's place is found by {self.source.way}")
            if self.source.way == "sampler":
                lines.append(f"the sampler at {_short(self.source.at)}")
        return Resumed(lines=tuple(lines), window=self.window, fields=self.fields)


def _short(state: Any) -> str:
    """A sampler's state in one line, the same for the same state."""
    if not isinstance(state, dict):
        return repr(state)
    shown = {
        key: hashlib.blake2b(value, digest_size=8).hexdigest() if isinstance(value, bytes) else value
        for key, value in sorted(state.items())
    }
    return repr(shown)


def states_of(given: object, name: str) -> list[LoaderState]:
    """Reads one state, or those of all ranks.

    Raises:
        ResumeError: If it is neither, or not of the loader of this name.
    """
    states = [given] if isinstance(given, dict) else given
    if not isinstance(states, list | tuple) or not states:
        raise ResumeError(f"state is {given!r}; give this rank's state, or a list of those of all ranks")
    return [LoaderState.from_state(one, name) for one in states]


def state_for(states: Sequence[LoaderState], loader: Any, *, rank: int, world_size: int) -> LoaderState:
    """What a rank goes on from, given one rank's state or those of all ranks of the old job.

    Args:
        states: One, or all, by rank.
        loader: That goes on.
        rank: This one.
        world_size: Of the ranks that balance together now.

    Raises:
        ResumeError: If that cannot be told from them.
    """
    first = states[0]
    if len(states) > 1:
        _check_all(states)
    by_sampler = first.source is None or first.source.way == "sampler"
    if first.world_size == world_size:
        if len(states) > 1:
            return states[rank]
        if first.rank != rank and not by_sampler:
            raise ResumeError(
                f"state['rank'] is {first.rank}, and this is rank {rank}; load the state that this rank saved, or "
                "those of all ranks as a list; where one value is saved for all ranks, save JobState(loader)"
            )
        return replace(first, rank=rank)
    first = replace(first, fields=next((one.fields for one in states if one.fields), ()))
    if first.window is not None and not first.finished:
        raise ResumeError(
            f"state['world_size'] is {first.world_size}, this job has {world_size}, and the state was taken within a "
            "window, which only as many ranks can divide as before; go on from a state between windows, or with "
            "load_state_dict(…, repeat_window=True), which trains the whole window again"
        )
    if first.finished or by_sampler:
        return replace(first, rank=rank, world_size=world_size)
    if len(states) < first.world_size:
        raise ResumeError(
            f"state['world_size'] is {first.world_size}, and this job has {world_size}; load the states of all "
            f"{first.world_size} ranks as a list"
        )
    if hasattr(loader, "load_state_dicts"):
        return replace(first, rank=rank, world_size=world_size, source=_all(states))
    raise ResumeError(
        f"state['world_size'] is {first.world_size}, and this job has {world_size}, for which the loader's data must "
        "be of the whole job: use trainer_client.balancing.sampling.GlobalBatchSampler, or give the loader "
        "load_state_dicts(states of all ranks)"
    )


def _check_all(states: Sequence[LoaderState]) -> None:
    for rank, one in enumerate(states):
        if (one.rank, one.world_size) != (rank, len(states)):
            raise ResumeError(
                f"states[{rank}] is of rank {one.rank} of {one.world_size}; give the states of all "
                f"{states[0].world_size} ranks of one checkpoint, in the order of the ranks"
            )
    check_resumed(states[0].name, [one.resumed for one in states])


def _all(states: Sequence[LoaderState]) -> Place:
    """The places of all ranks in one, for a loader that deals them out again."""
    places = [one.source for one in states if one.source is not None]
    return Place("loader", pickle.dumps([pickle.loads(place.at) for place in places]), of_all=True)
