"""The ranks that may share samples, and attention of their sequences, some of which are pieces of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from evenkeel.partitioning.splits import SplitSample, check_splits
from trainer_client.attention.exchange import Exchange, anchor, send_results, start, wait
from trainer_client.attention.pieces import Blocks, Pieces, Rows
from trainer_client.checks import is_whole
from trainer_client.process_groups import make_group, node_name, timeout_of

Attended: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""(rows, heads, value dim) sums over keys; of a softmax with (rows, heads) logarithms of its sums of exponentials."""


class PieceGroup:
    """Ranks that may share samples, with a communicator of their own for keys and values."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, max_ctas: int = 32) -> None:
        """Makes the communicator. Collective.

        Args:
            process_group: The data-parallel ranks; default: all. Without `torch.distributed` there is one rank.
            max_ctas: Blocks of the GPU that NCCL takes at most. More of them send faster, and are kept from the
                attention that a rank computes while it waits for another.

        Raises:
            ValueError: If `max_ctas` is no positive number.
        """
        if not is_whole(max_ctas) or max_ctas < 1:
            raise ValueError(f"max_ctas is {max_ctas!r}; give a whole number >= 1")
        prepare()
        self._group: dist.ProcessGroup | None = None
        self._rank, self._num_ranks, self._nodes = 0, 1, [0]
        if dist.is_available() and dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
            if self._num_ranks > 1:
                self._group, self._nodes = _connect(process_group, max_ctas)

    def pieces(self, samples: Sequence[SplitSample], *, contextual: bool = True) -> Pieces | None:
        """What this rank does in a step. Nothing is sent; every rank passes the same samples.

        Args:
            samples: All split samples of the step, of all ranks, as `BalancedLoader.splits` gives them; empty if there
                is none.
            contextual: Whether contextual positions see all of the history in this model, as in HSTU; False: they are
                causal like the rest, whatever the samples say.

        Returns:
            The rank's pieces, or None if it has none: then it sends and receives nothing in this step.

        Raises:
            ValueError: If a piece is on no rank of the group, or two are the same sequence.
        """
        samples = tuple(samples)
        check_splits(samples, self._num_ranks)
        if all(piece.rank != self._rank for sample in samples for piece in sample.pieces):
            return None
        if not contextual:
            samples = tuple(replace(sample, num_context=0) for sample in samples)
        return Pieces(samples, self._rank, self._group, self._nodes)


def _connect(parent: dist.ProcessGroup | None, max_ctas: int) -> tuple[dist.ProcessGroup, list[int]]:
    """A communicator of the same ranks, and the node of each, as a number. Collective."""
    whole = parent if parent is not None else dist.group.WORLD
    assert whole is not None
    backend = str(dist.get_backend(whole))
    options, timeout, device = None, timeout_of(whole), "cpu"
    if "nccl" in backend:
        options, device = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True), "cuda"  # sends come first
        options.config.max_ctas = max_ctas
        if timeout is not None:
            options._timeout = timeout
    group = make_group(dist.get_process_group_ranks(whole), backend, timeout, use="-pieces", options=options)
    # It also connects NCCL, which does so at the first collective, in which all of its ranks must take part.
    name = int.from_bytes(hashlib.blake2b(node_name().encode(), digest_size=7).digest())
    names = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(names, torch.tensor([name], device=device), group=group)
    return group, names.tolist()


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
        attended = own(query, key, value)
        return attended if isinstance(attended, Tensor) else attended[0]
    result: Tensor = untraced(_attend, query, key, value, offsets, pieces, own, other)
    return result


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


untraced: Callable[..., Any] = _call
"""Calls a function outside of what torch.compile traces."""


def prepare() -> None:
    """Makes `untraced` ready; not when this module is imported, since the compiler takes long to import."""
    global untraced  # noqa: PLW0603
    if untraced is _call:
        untraced = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    pieces: Pieces,
    own: Callable[[Tensor, Tensor, Tensor], Attended],
    other: Callable[[Tensor, Tensor, Tensor, Blocks], Attended],
) -> Tensor:
    rows = pieces.rows(offsets)
    keys, values, queries = (tensor.index_select(0, rows) for tensor in (key, value, query))
    exchange = Exchange(pieces, keys[:0], values[:0], queries[:0])
    token, *arriving = start(exchange, keys, values, queries)
    whole = _checked("own", own(query, key, value))
    token, arrived_keys, arrived_values, arrived_queries = wait(exchange, token, *arriving)
    local = [part.index_select(0, rows) for part in whole]
    results = [part.new_empty(0, *part.shape[1:]) for part in whole]
    blocks = pieces.blocks(query.device)
    if blocks is not None:
        attended = other(
            pieces.queries_of(queries, arrived_queries),
            pieces.keys_of(keys, arrived_keys),
            pieces.keys_of(values, arrived_values),
            blocks,
        )
        results = _checked("other", attended)
        if len(results) != len(whole):
            kinds = ["a tensor" if len(parts) == 1 else "a pair" for parts in (whole, results)]
            raise ValueError(f"own returns {kinds[0]}, other {kinds[1]}; let both return a tensor, or both a pair")
    returned = [part.narrow(0, 0, 0) for part in results]
    if pieces.returned.leaving or pieces.returned.arriving:
        token, *returned = send_results(exchange, token, *results)
    merged = _merged(pieces, local, results, returned)
    result: Tensor = whole[0].index_copy(0, rows, anchor(merged.to(whole[0].dtype), token))
    return result


def _merged(pieces: Pieces, local: list[Tensor], results: list[Tensor], returned: list[Tensor]) -> Tensor:
    """The rows of this rank's pieces, with what they see elsewhere."""

    def part(rows: Rows, of: list[Tensor]) -> list[Tensor]:
        return [tensor.narrow(0, rows.begin, rows.size) for tensor in of]

    done = pieces.num_seeing
    seeing = Rows(False, 0, done)
    stretches = [_merge([part(seeing, local), part(seeing, results)])] if done else []
    for begin, size, elsewhere in pieces.merges:
        stretches.append(local[0].narrow(0, done, begin - done))
        others = [part(rows, returned if rows.arrived else results) for rows in elsewhere]
        stretches.append(_merge([part(Rows(False, begin, size), local), *others]))
        done = begin + size
    stretches.append(local[0].narrow(0, done, pieces.num_rows - done))
    return torch.cat(stretches)


def _merge(parts: Sequence[list[Tensor]]) -> Tensor:
    """Results of the same queries over different keys, as one: by sums, or by the logarithms of softmaxes' sums."""
    sums = torch.stack([part[0] for part in parts])
    if len(parts[0]) == 2:
        sums = sums * torch.softmax(torch.stack([logs for _, logs in parts]), 0).unsqueeze(-1)
    return sums.sum(0).to(parts[0][0].dtype)  # autocast sums in float32


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
