"""Memory that pool and worker share, and the messages in it: a round, and its plan or why there is none."""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.parts import PIECE_WIDTH, RoundParts
from evenkeel.partitioning.rounds import FIGURES, Figures, RoundOptions, RoundPlan
from evenkeel.partitioning.samples import Column, RoundSamples
from evenkeel.partitioning.slices import Slices
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, Straggler
from evenkeel.partitioning.split_options import SplitOptions
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import PlanInput
from services.balancer.node_answers import Told, ToldPlan

_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2  # of fcntl.h; the module names them only from Python 3.13 on
_LEAST = 1 << 20
_ALIGNMENT = 64
_DTYPES = {name: np.dtype(name) for name in ("|u1", "<i4", "<i8", "<u4", "<f8")}
_PER_RANK = ("speeds", "memory_caps")  # of the options
_SCALARS = tuple(field.name for field in fields(RoundOptions) if field.name not in (*_PER_RANK, "split", "learned"))
_U1, _I4, _I8, _F8 = (_DTYPES[name] for name in ("|u1", "<i4", "<i8", "<f8"))
_PLAN = ((_U1, 1), (_F8, 2), (_F8, 2))  # what is told, loads before and after
_PARTS = ((_I8, 1), (_I8, 1), (_I8, 2))  # of split samples
_SLICES = ((_I4, 1), (_I8, 1), (_I8, 1), (_I4, 1), (_I4, 1), (_I8, 2), (_I4, 1))
_values = attrgetter(*FIGURES)
_dumps, _loads = json.JSONEncoder(separators=(",", ":")).encode, json.JSONDecoder().decode


class MessageError(ValueError):
    """What was read is no message: whoever wrote it is not to be trusted any more."""


class Arena:
    """A file in memory, mapped by two processes that take turns; it grows, and never shrinks under a reader.

    It is anonymous: nothing is needed of /dev/shm, which containers keep small, and nothing is left behind.
    """

    def __init__(self, fd: int) -> None:
        """Maps what another process has made; takes the descriptor over."""
        self.fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str) -> Arena:
        """An arena of this process and of whoever is sent its descriptor.

        Raises:
            OSError: If there are no more descriptors.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)  # a process that went mad cannot pull memory from under the other
        os.ftruncate(fd, _LEAST)
        return cls(fd)

    @property
    def nbytes(self) -> int:
        """Memory that it takes at most."""
        return os.fstat(self.fd).st_size

    @property
    def mapped_bytes(self) -> int:
        """Memory of it that this process has seen in use."""
        return 0 if self._map is None else len(self._map)

    def close(self) -> None:
        """Gives up this process's side; arrays that were read without a copy stay good."""
        self._map = None
        os.close(self.fd)

    def write(self, header: str, columns: Sequence[Column]) -> int:
        """Writes a message over the last, its header being an object in JSON; returns its length in bytes."""
        table, places, nbytes = _layout(tuple([(dtype, shape) for dtype, shape, _ in columns]))
        head = f"[{header},{table}]".encode()
        begin = _aligned(8 + len(head))
        memory = self._mapped(begin + nbytes, grow=True)
        memory[: 8 + len(head)] = len(head).to_bytes(8, "little") + head
        for (dtype, shape, parts), place in zip(columns, places, strict=True):
            target = np.ndarray(shape, dtype, memory, begin + place)
            if len(parts) == 1:
                target[...] = parts[0]
            elif target.size:
                np.concatenate(parts, out=target)
        return begin + nbytes

    def read(self, nbytes: int, *, copy: bool = False) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """Reads a message; its arrays are the shared memory itself, good until the next message, or `copy` a copy.

        Raises:
            MessageError: If it is none.
        """
        try:
            memory: mmap.mmap | bytes = self._mapped(nbytes, grow=False)
            if copy:
                memory = memory[: max(0, nbytes)]
            length = int.from_bytes(memory[:8], "little")
            if 8 + length > nbytes:
                raise MessageError(f"a header of {length} bytes in a message of {nbytes}")
            header, table = _loads(str(memory[8 : 8 + length], "ascii"))
            arrays, begin = [], _aligned(8 + length)
            for name, *shape in table:
                array: NDArray[Any] = np.ndarray(shape, _DTYPES[name], memory, begin)  # of which NumPy checks all
                arrays.append(array)
                begin = _aligned(begin + array.nbytes)
            if begin > _aligned(nbytes):
                raise MessageError(f"arrays of {begin} bytes in a message of {nbytes}")
        except MessageError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise MessageError(f"{type(error).__name__}: {error}") from error
        if not isinstance(header, dict):
            raise MessageError("a header that is no object")
        return header, arrays

    def _mapped(self, nbytes: int, *, grow: bool) -> mmap.mmap:
        if self._map is None or len(self._map) < nbytes:
            if grow and self.nbytes < nbytes:
                os.ftruncate(self.fd, 1 << (nbytes - 1).bit_length())
            # The old map goes with the last array that was read from it.
            self._map = mmap.mmap(self.fd, self.nbytes)
            if len(self._map) < nbytes:
                raise MessageError(f"a message of {nbytes} bytes in {len(self._map)}")
        return self._map


@lru_cache(maxsize=256)
def _layout(kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> tuple[str, list[int], int]:
    """Arrays in JSON, where each begins after the first, and the end of all: most rounds of a session are alike."""
    end, places = 0, []
    for dtype, shape in kinds:
        places.append(end)
        end = _aligned(end + math.prod(shape) * dtype.itemsize)
    return _dumps([(dtype.str, *shape) for dtype, shape in kinds]), places, end


def write_round(arena: Arena, inputs: PlanInput) -> int:
    """Writes a round for a worker, its ranks' arrays joined; returns its length in bytes."""
    columns = columns_of(inputs)
    header, limits = _header_of(inputs.options, tuple(columns), inputs.together)
    return arena.write(header, [*columns.values(), *limits])


@lru_cache(maxsize=256)
def _header_of(
    options: RoundOptions, names: tuple[str, ...], together: tuple[tuple[int, ...], ...]
) -> tuple[str, list[Column]]:
    """What of a round's message is the same in most rounds of a session: its header, and the limits by rank."""
    header: dict[str, Any] = {"arrays": names, "options": {name: getattr(options, name) for name in _SCALARS}}
    header["together"] = together
    if options.split is not None:
        header["split"] = asdict(options.split)
    if options.learned:
        header["learned"] = asdict(replace(options.learned, delays=()))
    return _dumps(header), [Column.of(np.array(getattr(options, name), np.float64)) for name in _PER_RANK]


def read_round(arena: Arena, nbytes: int) -> tuple[RoundSamples, RoundOptions, list[tuple[int, ...]]]:
    """Reads the round that was written, with who is told of its plan together; its arrays are the arena's."""
    header, arrays = arena.read(nbytes)
    count = len(header["arrays"])
    limits: dict[str, Any] = dict(zip(_PER_RANK, (tuple(each.tolist()) for each in arrays[count:]), strict=True))
    samples = RoundSamples(**dict(zip(header["arrays"], arrays[:count], strict=True)))
    split = SplitOptions(**header["split"]) if "split" in header else None
    learned = ALL_EQUAL
    if "learned" in header:
        slow = tuple(Straggler(**one) for one in header["learned"]["stragglers"])
        learned = LearnedSpeeds(stragglers=slow, fixed=header["learned"]["fixed"])
    options = RoundOptions(**header["options"], **limits, split=split, learned=learned)
    return samples, options, [tuple(ranks) for ranks in header["together"]]


def write_result(arena: Arena, result: RoundPlan | PlanFailure, told: Sequence[Told] = ()) -> int:
    """Writes the outcome of a partition, and what is told of it; returns its length in bytes."""
    if isinstance(result, PlanFailure):
        return arena.write(_dumps({"reason": int(result.reason), "detail": result.detail}), [])
    header = {
        "digest": result.digest.hex(), "seconds": result.seconds, "batches": [_values(each) for each in result.batches],
        "told": [len(each) for pair in told for each in pair],
    }  # fmt: skip
    parts = result.parts
    of_parts = () if parts is None else (parts.samples, parts.begins, parts.pieces)
    header["parts"] = len(of_parts)
    said = np.frombuffer(b"".join(chain.from_iterable(told)), _U1)
    arrays = (said, result.loads_before, result.loads_after, *of_parts, *result.slices.arrays)
    return arena.write(_dumps(header), [Column.of(array) for array in arrays])


def read_result(arena: Arena, nbytes: int, together: Sequence[tuple[int, ...]] = ()) -> ToldPlan | PlanFailure:
    """Reads the outcome of a partition; its arrays are a copy.

    Args:
        arena: Where it is.
        nbytes: Its length.
        together: Who is told of it together.

    Raises:
        MessageError: If it is none.
    """
    header, arrays = arena.read(nbytes, copy=True)
    try:
        if "reason" in header:
            return PlanFailure(reason=Reason(header["reason"]), detail=str(header["detail"]))
        cut = _PARTS if header["parts"] else ()
        kinds = _PLAN + cut + _SLICES
        if not len(kinds) - 1 <= len(arrays) <= len(kinds):  # the batches of the samples come last, if there are any
            raise MessageError(f"{len(arrays)} arrays of a plan")
        for array, (dtype, dimensions) in zip(arrays, kinds, strict=False):
            if array.dtype != dtype or array.ndim != dimensions:
                raise MessageError(f"{array.dtype} of {array.ndim} dimensions where {dtype} of {dimensions} belongs")
        told, before, after, *others = arrays
        of_parts, slices = others[: len(cut)], others[len(cut) :]
        parts = None
        if cut:
            samples, begins, pieces = of_parts
            if samples.size != begins.size or samples.size != slices[0].size or pieces.shape[1] != PIECE_WIDTH:
                raise MessageError("arrays of parts that do not fit each other")
            parts = RoundParts(samples=samples, begins=begins, pieces=pieces)
        return ToldPlan(
            told=_told(told, header["told"], together),
            slices=Slices(*slices),
            parts=parts,
            loads_before=before,
            loads_after=after,
            batches=tuple(map(_figures, header["batches"])),
            digest=bytes.fromhex(header["digest"]),
            seconds=float(header["seconds"]),
        )
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"{type(error).__name__}: {error}") from error


def _told(
    data: NDArray[np.uint8], lengths: list[int], together: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Told]:
    """What is told, of two pieces for each who are told together."""
    ends = [0, *accumulate(lengths)]
    if len(lengths) != 2 * len(together) or ends[-1] != data.size or min(lengths, default=0) < 0:
        raise MessageError(f"{data.size} bytes for {len(together)} who are told together, in pieces of {lengths[:16]}")
    pieces = [data[begin:end].tobytes() for begin, end in pairwise(ends)]
    return dict(zip(together, zip(pieces[::2], pieces[1::2], strict=True), strict=True))


def columns_of(inputs: PlanInput) -> dict[str, Column]:
    """The arrays of a round's samples by name, not joined yet: whoever joins them says where."""
    return RoundSamples.columns(
        inputs.parts,
        _numbered(inputs.nodes),
        with_memory=bool(inputs.options.memory_caps),
        roles=np.array(inputs.roles, np.int64) if inputs.roles else None,
    )


def _numbered(nodes: tuple[str, ...]) -> NDArray[np.int32] | None:
    """Hosts numbered in order of appearance; None when there is at most one."""
    numbers: dict[str, int] = {}
    numbered = [numbers.setdefault(node, len(numbers)) for node in nodes]
    return np.array(numbered, np.int32) if len(numbers) > 1 else None


def _figures(values: list[Any]) -> Figures:
    if not {int, float}.issuperset(map(type, values)):
        raise MessageError(f"figures of {values}")
    return Figures(**dict(zip(FIGURES, values, strict=True)))


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
