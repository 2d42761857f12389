"""Programs of the examples, run as torchrun runs them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import zygote
from benchmarks.harness.launched import environments

RANKS = 2


def printed_by_ranks(module: str, folder: Path, **environment: str) -> str:
    """What rank 0 of two prints.

    Args:
        module: The program.
        folder: Where what the ranks print is kept.
        environment: Further variables.
    """
    variables = environments(RANKS, str(folder))
    ranks = [
        zygote.Program(
            module, output=folder / f"{rank}.out", errors=folder / f"{rank}.err",
            **variables(rank), **environment,
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
