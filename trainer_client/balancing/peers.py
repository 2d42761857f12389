"""Ranks that train copies of the same batches, as of tensor parallelism: whether they hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.contribution import Contribution, Contributions, State
from trainer_client.balancing.errors import PeersDifferError


def digest_of_copy(flats: Sequence[FlatBatch], contribution: Contribution, *, values: bool) -> int:
    """64 bits of what peers must have alike: lengths, and values where asked for."""
    digest = hashlib.blake2b(np.ascontiguousarray(contribution.samples.lengths).tobytes(), digest_size=8)
    for flat in flats if values else ():
        for tensor in flat.tensors:
            if tensor.device.type == "cpu":
                plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
                digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") or 1


def check_copies(contributions: Contributions, ranks: NDArray[np.int64] | None, number: int) -> None:
    """Raises `PeersDifferError` if copies differ; `ranks` (ranks, peers) are the job's of those that hold them."""
    copies = contributions.copies
    facts = ("state", "num_samples", "schema", "copy")
    if copies.shape[1] == 1 or all((copies[name] == copies[name][:, :1]).all() for name in facts):
        return
    differs = np.any([copies[name] != copies[name][:, :1] for name in facts], axis=0)
    rank, peer = np.argwhere(differs)[0].tolist()
    first, second = (rank, f"{rank}.{peer}") if ranks is None else (ranks[rank, 0], ranks[rank, peer])
    leader, other = copies[rank, 0], copies[rank, peer]
    if other["state"] != leader["state"]:
        ended, more = ("has no", "has one") if other["state"] == State.EXHAUSTED else ("has another", "has none")
        what = f"{ended} batch where rank {first} {more}"
    elif other["num_samples"] != leader["num_samples"]:
        what = f"has {other['num_samples']} samples where rank {first} has {leader['num_samples']}"
    elif other["schema"] != leader["schema"]:
        what = f"has batches of other fields or dtypes than rank {first}"
    else:
        what = f"has other samples than rank {first}"
    raise PeersDifferError(
        f"in round {number} rank {second} {what}, and the two were said to train the same batches (by peers, or by a "
        "dimension of the mesh that is not process_group's); let them load the same samples in the same order, as by "
        "mesh['dp'].get_local_rank(); if they train different ones, balance over them too, or pass "
        "process_group=mesh['dp'].get_group()"
    )
