"""What comes to the host from where it is."""

from __future__ import annotations

import torch

from trainer_client.balancing.batches.arriving import _Coming


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device."""

    is_cpu = False  # type: ignore[assignment]


def test_lengths_of_objects_are_on_the_host_already() -> None:
    lengths = [torch.arange(size, size + 3) for size in range(4)]
    mixed = [lengths[0].as_subclass(Elsewhere), lengths[1], lengths[2].as_subclass(Elsewhere), lengths[3]]
    for given in (lengths, mixed, mixed[:1], mixed[1:2], []):
        came = _Coming(given, torch.int64).get()
        assert [part.tolist() for part in came] == [one.tolist() for one in given]
