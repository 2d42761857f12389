"""Which ranks share a stream to the service: those of one node, if they can reach its leader."""

from __future__ import annotations

import os
from pathlib import Path

from trainer_client.balancing.groups import Groups, node_name
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.service.frames import connect, listen
from trainer_client.balancing.service.node import NodeSeat

AUTO_RANKS = 32
"""From which world size on `node_leader="auto"` means yes: below it a balancer decides in milliseconds either way."""

_REACH_SECONDS = 5.0
_LINGER = 0.05  # of the timeout: less than what the service leaves of it for its answer's way back


def take_seat(groups: Groups, options: BalanceOptions) -> NodeSeat | None:
    """This rank's place in its node, or None if it opens a stream of its own. Collective.

    Args:
        groups: The ranks that balance together.
        options: Rank 0's options.

    Raises:
        ConnectionError: If `node_leader` is True and some rank cannot reach its leader; on all ranks.
    """
    wanted = options.node_leader
    if wanted is False or (wanted == "auto" and groups.world_size < AUTO_RANKS):
        return None
    places = groups.gather_objects(_place())
    ranks = tuple(rank for rank, place in enumerate(places) if place == places[groups.rank])
    listener, address, problem = None, b"", ""
    if len(ranks) > 1 and groups.rank == ranks[0]:
        try:
            listener, address = listen()
        except OSError as error:
            problem = str(error)
    address = groups.gather_objects(address)[ranks[0]]
    if len(ranks) > 1 and groups.rank != ranks[0] and address:
        try:
            connect(address, _REACH_SECONDS).close()
        except OSError as error:
            problem = str(error)
    problems = groups.gather_objects(problem)
    if wanted is True and any(problems):
        first = next(rank for rank, said in enumerate(problems) if said)
        raise ConnectionError(
            f"node_leader is True, but rank {first} and the leader of its node cannot meet: {problems[first]}; "
            "use node_leader='auto' or False"
        )
    if len(ranks) == 1 or any(problems[rank] for rank in ranks):
        if listener is not None:
            listener.close()
        return None
    linger = _LINGER * options.timeout.total_seconds()
    return NodeSeat(rank=groups.rank, ranks=ranks, address=address, listener=listener, linger=linger)


def _place() -> tuple[str, ...]:
    """What ranks that can meet have in common: the node's name, the running kernel, the network, the user."""
    facts = [node_name(), str(os.getuid())]
    try:
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/net")]
    except OSError:
        facts.append(str(os.getpid()))  # unknown: alone
    return tuple(facts)
