"""The state of a balanced loader as one value of the whole job, for checkpoints that keep one value for all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trainer_client.balancing.errors import ResumeError
from trainer_client.balancing.loader import BalancedLoader
from trainer_client.process_groups import make_group

_KEY = "ranks"


class JobState:
    """The state of a loader on all ranks as one value, for checkpoints that keep one value for the whole job.

    A loader's state is that of its rank. Lightning, Accelerate and many loops of one's own write what rank 0 has, and
    load it on every rank; `torch.distributed.checkpoint` writes the value of one of the ranks that save it under the
    same name. This has the methods that all of them look for, and what is saved serves any number of ranks.

    The ranks that balance together share a value. Where a job has several such groups, which train different batches,
    save each group's under a name of its own.
    """

    def __init__(self, loader: BalancedLoader[Any], *, ahead: Callable[[], int] = int) -> None:
        """Stands for the loader.

        Args:
            loader: This rank's; every rank of the job makes a `JobState` of its own.
            ahead: How many of the batches that the loader has handed over are not trained yet, where something
                fetches ahead of training, such as a pipeline; default: none.
        """
        self._loader, self._ahead = loader, ahead
        self._group: dist.ProcessGroup | None = None  # of the ranks that balance, where these are not the whole job

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have handed over and trained, the same value on all of them; a few KB for each rank.

        The ranks that balance together call it together: it gathers their states.

        Raises:
            RuntimeError: If a rank cannot tell its state; on all ranks, with what that rank said.
        """
        state, problem = None, ""
        try:
            state = self._loader.state_dict(ahead=self._ahead())
        except Exception as error:
            problem = f"rank {dist.get_rank() if dist.is_initialized() else 0}: {type(error).__name__}: {error}"
        ranks = self._loader.balancer.ranks
        gathered: list[Any] = [(state, problem)] * len(ranks)
        if len(ranks) > 1:
            if self._group is None and len(ranks) < dist.get_world_size():
                self._group = make_group(ranks, "gloo", use="/state")
            dist.all_gather_object(gathered, (state, problem), group=self._group)
        if problems := [problem for _, problem in gathered if problem]:
            raise RuntimeError("the loader's state cannot be saved; " + "; ".join(problems))
        # One value, which checkpoints neither take apart nor look into: before loading nobody knows how many ranks.
        return {_KEY: pickle.dumps([state for state, _ in gathered])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what was saved, before a loop begins; on as many ranks as there were or on any other number.

        Args:
            state: From `state_dict`; empty where a checkpoint holds none: nothing changes.

        Raises:
            ResumeError: If it is something else, or does not fit the loader.
        """
        if state and _KEY not in state:
            raise ResumeError(
                f"the loader's state has the fields {sorted(state)} and not {_KEY!r}; load what JobState.state_dict "
                "gave, and what BalancedLoader.state_dict gave with BalancedLoader.load_state_dict"
            )
        if state:
            self._loader.load_state_dict(pickle.loads(state[_KEY]))
