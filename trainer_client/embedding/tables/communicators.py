"""A communicator of their own for the collections of a process group.

Keys and rows travel in the forward and the backward pass, between whatever else uses the group: a wrapper's reductions
come earlier on a rank that leaves parameters unused than on one that does not, and would meet them.
"""

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer_client.process_groups import make_group

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def exchange_group(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The communicator on which all collections of a process group exchange keys and rows.

    The first call for a group is collective: every rank of the group makes it.

    Args:
        parent: The ranks; None for the default group.
    """
    group = parent if parent is not None else dist.group.WORLD
    assert group is not None
    if group not in _made:
        _made[group] = make_group(dist.get_process_group_ranks(group), str(dist.get_backend(group)), _timeout(group))
    return _made[group]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's collectives may take; None, the backend's default, where it does not tell."""
    for device in ("cuda", "cpu"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        assert isinstance(timeout, timedelta)
        return timeout
    return None
