"""What comes to the host from where it is."""

from __future__ import annotations

import torch

from trainer_client.balancing.batches.arriving import Coming


class OnDevice(torch.Tensor):
    """A tensor that says it is on another device."""

    is_cpu = False  # type: ignore[assignment]


def test_numbers_come_in_the_order_of_their_tensors_from_wherever_they_are() -> None:
    lengths = [torch.arange(size, size + 3) for size in range(3)] + [torch.arange(2) / 4]
    mixed = [lengths[0].as_subclass(OnDevice), lengths[1], lengths[2].as_subclass(OnDevice), lengths[3]]
    for tensors in (lengths, mixed, mixed[:1], mixed[1:2], mixed[::-1], []):
        assert [part.tolist() for part in Coming(tensors).get()] == [one.tolist() for one in tensors]
