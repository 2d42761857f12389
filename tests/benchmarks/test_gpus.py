"""Ranks that share GPUs are told to be on several hosts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpus import own_gpu

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("rank", "ranks", "gpus", "expected"),
    [
        (1, 2, 2, ("1", "2", None, None)),
        (1, 2, 4, ("1", "2", None, None)),
        (1, 8, 2, ("1", "2", "host-0", "lo")),
        (6, 8, 2, ("0", "2", "host-3", "lo")),
    ],
)
def test_ranks_and_their_gpus(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, gpus: int, expected: tuple[str | None, ...]
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    given = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}
    environment = dict(given)
    monkeypatch.setattr("benchmarks.gpus.os.environ", environment)
    device = own_gpu()
    assert chosen == [device]
    assert device == torch.device("cuda", int(expected[0] or 0))
    assert tuple(environment.get(name) for name in NAMES) == expected
