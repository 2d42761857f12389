"""Which ranks balance together, and which train the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A rank among the ranks of its job; all numbers are those of the default process group."""

    ranks: tuple[int, ...]  # that balance together, ascending, this one among them: a data-parallel group
    peers: tuple[int, ...]  # that train the same batches, in the order of their group or mesh; the first contributes
    backend: str  # of the data-parallel group
    rank: int  # this one

    @property
    def group_name(self) -> str:
        """What the service calls these ranks unless the user does: groups of their own by their first ranks."""
        everyone = len(self.ranks) * len(self.peers) == dist.get_world_size()
        return "default" if everyone else f"from-rank-{self.ranks[0]}"


def read_membership(process_group: Ranks | None, peers: Ranks | None) -> Membership | None:
    """The ranks that a user's process groups or meshes mean; None where torch.distributed is not initialised.

    Args:
        process_group: The data-parallel group of this rank, or the dimensions of a mesh that make it, such as
            `mesh["dp"]`; None: all ranks.
        peers: The ranks that train the same batches. None: those of the other dimensions of the mesh that
            `process_group` was cut from; without a mesh, no others.

    Raises:
        ValueError: If it is not clear who balances with whom.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is None and peers is None:
            return None
        raise ValueError("process_group is given, but torch.distributed is not initialised; initialise it first")
    rank = dist.get_rank()
    if process_group is None:
        if peers is not None:
            raise ValueError("peers is given without process_group; pass the data-parallel group too, as mesh['dp']")
        everyone = tuple(range(dist.get_world_size()))
        return Membership(ranks=everyone, peers=(rank,), backend=_backend(dist.group.WORLD), rank=rank)
    if (
        isinstance(process_group, DeviceMesh)
        and process_group.ndim > 1
        and process_group._get_root_mesh() is process_group
    ):
        names = process_group.mesh_dim_names
        example = f"mesh[{names[0]!r}]" if names else "a mesh with mesh_dim_names, cut as mesh['dp']"
        several = f", or mesh[{', '.join(map(repr, names[:-1]))}] for several" if names and len(names) > 2 else ""
        raise ValueError(
            f"process_group is a mesh of the dimensions {_dims(process_group)}; say which of them hold different "
            f"batches: pass {example}{several}, or leave process_group out if all ranks load batches of their own"
        )
    ranks = _ranks("process_group", process_group, rank)
    if peers is not None:
        same = _ranks("peers", peers, rank)
    elif isinstance(process_group, DeviceMesh):
        same = _other_dimensions(process_group, rank)
    else:
        same = (rank,)
    both = sorted(set(ranks) & set(same) - {rank})
    if both:
        raise ValueError(
            f"ranks {both} are in both process_group and peers; peers train the same batches as this rank, those of "
            "process_group others"
        )
    one = process_group.get_group(0) if isinstance(process_group, DeviceMesh) else process_group
    return Membership(ranks=tuple(sorted(ranks)), peers=same, backend=_backend(one), rank=rank)


def check_grid(mine: Membership, peers_of_ranks: list[tuple[int, ...]], ranks_of_peers: list[tuple[int, ...]]) -> str:
    """What is wrong if data-parallel groups and peers do not cross like rows and columns of one grid; empty: nothing.

    Given are `peers` of each of `mine.ranks`, and `ranks` of each of `mine.peers`.
    """
    if len({len(peers) for peers in peers_of_ranks}) == 1:
        across = [tuple(peers[at] for peers in peers_of_ranks) for at in range(len(mine.peers))]
        if across == ranks_of_peers:
            return ""
    return (
        f"process_group and peers of rank {mine.rank} do not fit those of others: it balances with {list(mine.ranks)}, "
        f"which have the peers {list(map(list, peers_of_ranks))}, while its own peers {list(mine.peers)} balance with "
        f"{list(map(list, ranks_of_peers))}; pass two dimensions of one mesh on all ranks, such as mesh['dp'] and "
        "mesh['tp']"
    )


def _ranks(field: str, value: Any, rank: int) -> tuple[int, ...]:
    if isinstance(value, DeviceMesh):
        ranks = tuple(value.mesh.flatten().tolist())
    elif isinstance(value, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(value))
    else:
        raise ValueError(
            f"{field} is {value!r}; pass a process group that this rank is in, or dimensions of a DeviceMesh"
        )
    if rank not in ranks:
        raise ValueError(f"{field} has the ranks {list(ranks)}, and this is rank {rank}; pass the group that it is in")
    return ranks


def _other_dimensions(mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """The ranks that differ from this one only in dimensions that `mesh` was not cut from."""
    root: DeviceMesh = mesh._get_root_mesh()
    if root is mesh or root.size() == mesh.size():
        return (rank,)
    names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if not names or not set(names) <= set(all_names):
        raise ValueError(
            f"process_group is a mesh of the dimensions {_dims(mesh)}, and it cannot be told which other ranks train "
            "the same batches; pass them as peers, such as peers=mesh['tp'], or process_group=mesh.get_group() if none "
            "does"
        )
    coordinate = root.get_coordinate()
    assert coordinate is not None
    at = tuple(index if name in names else slice(None) for name, index in zip(all_names, coordinate, strict=True))
    return tuple(root.mesh[at].flatten().tolist())


def _dims(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return ", ".join(f"{name} ({size})" for name, size in zip(names, mesh.mesh.shape, strict=True))


def _backend(group: dist.ProcessGroup | None) -> str:
    # "cpu:gloo,cuda:nccl" and the like serve both devices and stay as they are.
    return str(dist.get_backend(group))
