"""Programs of the examples, run as torchrun runs them."""

from __future__ import annotations

import socket
from pathlib import Path

from benchmarks.harness import zygote

RANKS = 2


def printed_by_ranks(module: str, folder: Path, **environment: str) -> str:
    """What rank 0 of two prints.

    Args:
        module: The program.
        folder: Where what the ranks print is kept.
        environment: Further variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        zygote.Program(
            module, output=folder / f"{rank}.out", errors=folder / f"{rank}.err",
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
            OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        codes = [rank.wait(90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * RANKS, "".join(path.read_text() for path in folder.glob("*.err"))
    return (folder / "0.out").read_text()
