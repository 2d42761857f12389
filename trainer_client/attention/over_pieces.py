"""Attention of a rank's sequences with themselves, some of which are pieces of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainer_client.attention.exchange import Exchange, anchor, give_back, start, wait
from trainer_client.attention.pieces import Blocks, Pieces, Rows

Attended: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""(rows, heads, value dim) sums over keys; of a softmax with (rows, heads) logarithms of its sums of exponentials."""


def attend_over_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    pieces: Pieces | None,
    *,
    own: Callable[[Tensor, Tensor, Tensor], Attended],
    other: Callable[[Tensor, Tensor, Tensor, Blocks], Attended],
) -> Tensor:
    """Attention as if each sample were whole, where some sequences are pieces of samples on several ranks.

    Keys and values of a piece go to the ranks of later pieces while these compute `own`; their gradients come home in
    the backward pass. All ranks that share a sample call this in the same order, and all of them call `backward`.

    Args:
        query: (rows, heads, head dim), one sequence of the rank's batch after the other.
        key: (rows, key heads, head dim).
        value: (rows, key heads, value dim).
        offsets: (sequences + 1,) where the sequences begin; any integers, on the same device.
        pieces: Which sequences are pieces; None if none is, and then the result is that of `own`.
        own: Attention of each sequence with itself, by the model's mask, from query, key and value.
        other: Attention in which each query of a block sees all keys of the block.

    Returns:
        (rows, heads, value dim).

    Raises:
        ValueError: If pieces do not have the rows that `offsets` say, as far as the host can see it, or one of `own`
            and `other` returns logarithms of sums and the other does not, or their shape or gradient is missing.
    """
    if pieces is None:
        return _sums(own(query, key, value))
    result: Tensor = apart(_attend, query, key, value, offsets, pieces, own, other)
    return result


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


apart: Callable[..., Any] = _call
"""Calls a function outside of what torch.compile traces."""


def prepare() -> None:
    """Makes `apart` ready; not when this module is imported, since the compiler takes long to import."""
    global apart  # noqa: PLW0603
    if apart is _call:
        apart = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    pieces: Pieces,
    own: Callable[[Tensor, Tensor, Tensor], Attended],
    other: Callable[[Tensor, Tensor, Tensor, Blocks], Attended],
) -> Tensor:
    exchange = Exchange(pieces)
    rows = pieces.rows(offsets)
    queries, keys, values = (tensor.index_select(0, rows) for tensor in (query, key, value))
    token, *arriving = start(exchange, queries, keys, values)
    attended = own(query, key, value)
    token, arrived_keys, arrived_values, arrived_queries = wait(exchange, token, *arriving)

    whole = _checked("own", attended)
    pieced = [part.index_select(0, rows) for part in whole]
    found = [part.new_empty(0, *part.shape[1:]) for part in whole]
    blocks = pieces.blocks(query.device)
    if blocks is not None:
        attended = other(
            pieces.queries_of(queries, arrived_queries),
            pieces.keys_of(keys, arrived_keys),
            pieces.keys_of(values, arrived_values),
            blocks,
        )
        found = _checked("other", attended)
        if len(found) != len(whole):
            raise ValueError(
                f"own returns {_named(whole)}, other {_named(found)}; let both return a tensor, or both a pair"
            )
    returned = [part.narrow(0, 0, 0) for part in found]
    if pieces.partials.leaving or pieces.partials.arriving:
        token, *returned = give_back(exchange, token, *found)
    merged = _merged(pieces, pieced, found, returned)
    result: Tensor = whole[0].index_copy(0, rows, anchor(merged.to(whole[0].dtype), token))
    return result


def _merged(pieces: Pieces, own: list[Tensor], found: list[Tensor], returned: list[Tensor]) -> Tensor:
    """The rows of own pieces, with what they see elsewhere."""

    def part(rows: Rows, of: list[Tensor]) -> list[Tensor]:
        return [tensor.narrow(0, rows.begin, rows.size) for tensor in of]

    seeing = pieces.num_seeing
    stretches = [_merge([part(Rows(False, 0, seeing), own), part(Rows(False, 0, seeing), found)])] if seeing else []
    done = seeing
    for begin, size, answers in sorted(pieces.merged, key=lambda each: each[0]):
        stretches.append(own[0].narrow(0, done, begin - done))
        known = [part(rows, returned if rows.arrived else found) for rows in answers]
        stretches.append(_merge([part(Rows(False, begin, size), own), *known]))
        done = begin + size
    stretches.append(own[0].narrow(0, done, pieces.num_rows - done))
    return torch.cat(stretches)


def _merge(parts: Sequence[list[Tensor]]) -> Tensor:
    """What the same queries found among different keys, as one: by sums, or by the logarithms of softmaxes' sums."""
    if len(parts[0]) == 1:
        return torch.stack([sums for (sums,) in parts]).sum(0).to(parts[0][0].dtype)  # autocast sums in float32
    logs = torch.stack([log for _, log in parts])
    weights = torch.softmax(logs, 0).unsqueeze(-1)
    return (torch.stack([sums for sums, _ in parts]) * weights).sum(0).to(parts[0][0].dtype)


def _checked(name: str, attended: Attended) -> list[Tensor]:
    if isinstance(attended, Tensor):
        return [attended]
    sums, logs = attended
    if logs.shape != sums.shape[:2]:
        raise ValueError(
            f"{name} returns logarithms of shape {tuple(logs.shape)} for {tuple(sums.shape)}; "
            f"return one for each row and head, {tuple(sums.shape[:2])}"
        )
    if sums.requires_grad and not logs.requires_grad:
        raise ValueError(
            f"{name} returns logarithms without a gradient, so that gradients would be wrong; use a kernel that "
            "computes it, as flex_attention does with return_lse=True"
        )
    return [sums, logs]


def _sums(attended: Attended) -> Tensor:
    return attended if isinstance(attended, Tensor) else attended[0]


def _named(parts: list[Tensor]) -> str:
    return "a tensor" if len(parts) == 1 else "a pair"
