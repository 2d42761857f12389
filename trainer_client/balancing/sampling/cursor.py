"""Where an epoch goes on: a place in the order, and what is left of a window before it. To and from plain values."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_client.checks import is_whole

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rest:
    """What a half-trained window has left: places of the order, ascending, before the one where the order goes on.

    Attributes:
        places: All of them.
        drawn: How many have been trained since.
        packed: A bit for each place from the first to the last one, in base 64.
    """

    places: NDArray[np.int64]
    drawn: int
    packed: str

    @classmethod
    def of(cls, places: NDArray[np.int64]) -> Rest:
        """Nothing of it trained yet."""
        bits = np.zeros(int(places[-1] - places[0]) + 1, np.bool_)
        bits[places - places[0]] = True
        return cls(places=places, drawn=0, packed=base64.b64encode(np.packbits(bits).tobytes()).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where an epoch goes on: first what a window has left, then the order from `place` on."""

    epoch: int
    place: int = 0
    rest: Rest | None = None
    left: NDArray[np.int64] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rest = self.rest
        object.__setattr__(self, "left", _NONE if rest is None else rest.places[rest.drawn :])

    def to_come(self, length: int) -> int:
        """Samples from here to the end of a data set."""
        return len(self.left) + length - self.place

    def after(self, samples: int) -> Cursor:
        """The cursor so many samples later."""
        if self.rest is None or samples >= len(self.left):
            return Cursor(epoch=self.epoch, place=self.place + samples - len(self.left))
        rest = Rest(places=self.rest.places, drawn=self.rest.drawn + samples, packed=self.rest.packed)
        return Cursor(epoch=self.epoch, place=self.place, rest=rest)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        rest = self.rest
        return {
            "epoch": self.epoch,
            "position": self.place,
            "rest": None
            if rest is None
            else {"begin": int(rest.places[0]), "places": rest.packed, "drawn": rest.drawn},
        }


def read_cursor(state: Mapping[str, Any], length: int) -> Cursor:
    """The cursor in a state.

    Args:
        state: A sampler's state.
        length: Samples of the data set.

    Raises:
        ValueError: If it is none of such a data set.
    """
    epoch, place = (_whole(state, name) for name in ("epoch", "position"))
    if place > length:
        raise ValueError(
            f"state['position'] is {place}, and the data set has {length} samples; load a state of its own"
        )
    rest = state.get("rest")
    if rest is None:
        return Cursor(epoch=epoch, place=place)
    try:
        begin, drawn = (_whole(rest, name) for name in ("begin", "drawn"))
        bits = np.unpackbits(np.frombuffer(base64.b64decode(rest["places"], validate=True), np.uint8))
        places = np.flatnonzero(bits) + begin
        if not drawn < len(places) or places[-1] >= place:
            raise ValueError(f"{len(places)} places from {begin} on, {drawn} of them drawn, do not end before {place}")
    except (ValueError, TypeError, KeyError, AttributeError, binascii.Error) as error:
        raise ValueError(f"state['rest'] cannot be read ({error}); load a state as `state_dict` returned it") from None
    return Cursor(epoch=epoch, place=place, rest=Rest(places=places, drawn=drawn, packed=rest["places"]))


def _whole(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not is_whole(value) or value < 0:  # type: ignore[operator]
        raise ValueError(f"state[{name!r}] is {value!r}; load a state as `state_dict` returned it")
    return int(value)  # type: ignore[arg-type]
