"""What torchrun gives to the ranks that it starts."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def environments(ranks: int, run_id: str) -> Callable[[int], dict[str, str]]:
    """The variables of each rank, by its number.

    The ranks' store is this process's own, as it is torchrun's: no port is chosen before somebody listens at it. It
    lives as long as the function that is returned.

    Args:
        ranks: How many there are.
        run_id: Names the run.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def of(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    return of
