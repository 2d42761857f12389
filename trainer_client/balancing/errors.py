"""What can be wrong with a job that balances, raised on all ranks alike.

Three kinds of errors meet a user: `ValueError` (something that was given is wrong: field, value, remedy; the classes
below that derive from it too), `ProgramOrderError` (loaders are used in an order that ranks cannot share), and
`RuntimeError` (a process group or a rank has failed, and with it the job).
"""

from __future__ import annotations


class ProgramOrderError(RuntimeError):
    """A program uses its loaders in an order that cannot be reconciled between the ranks."""


class SchemaMismatchError(ValueError):
    """Ranks hold batches of different schemas."""


class PeersDifferError(ValueError):
    """Ranks that were said to train the same batches hold different ones."""


class ResumeError(ValueError):
    """A state does not fit the job that shall go on from it, or the states of its ranks do not fit each other."""


class ServiceRequiredError(RuntimeError):
    """`BalanceOptions.require_service` is set, and the lead does not reach the service."""


class NoDataError(Exception):
    """No rank has had any batch yet, so nobody knows what an empty one looks like."""


def out_of_order(rank: int) -> ProgramOrderError:
    """The error of all ranks when one has taken its batches in an order of its own."""
    return ProgramOrderError(
        f"rank {rank} redistributes a batch out of turn: redistribute the batches of a loader in the order in which "
        "they were submitted, each once, and leave a loop (Balancer.leave) before beginning it anew"
    )


def used_after(name: str) -> ProgramOrderError:
    """The error of a loop that goes on although another one has begun on its stream."""
    return ProgramOrderError(
        f"a newer loop over {name!r} has begun, which ended this one; give loaders that are in use at the same time "
        "different names (BalancedLoader(name=…)), and go on with one iterator of a loader at a time"
    )


def used_closed(name: str) -> ProgramOrderError:
    """The error of a loop that goes on although its stream was closed."""
    return ProgramOrderError(
        f"the balancer was closed while a loop over {name!r} went on, which ended it on all ranks; close the balancer "
        "behind the loop, and leave a loop by break"
    )
