"""A small model over whole or split samples, in one process or on ranks."""

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.trainer_client.balancing.redistribution.pool import group_of
from trainer_client.attention import (
    DenseSilu,
    DenseSoftmax,
    Piece,
    PieceGroup,
    Pieces,
    SplitSample,
    VarlenSoftmax,
    attend_over_pieces,
)

WIDTH, HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM, LONGEST = 6, 4, 2, 3, 2, 64
CAUSAL = "varlen"
KERNELS: dict[str, Any] = {"softmax": DenseSoftmax(), "silu": DenseSilu(divisor=LONGEST)}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample, and the rank and end of each of its pieces."""

    pieces: tuple[tuple[int, int], ...]
    num_context: int = 0
    num_candidates: int = 0

    @property
    def length(self) -> int:
        return self.pieces[-1][1]

    @property
    def begins(self) -> list[int]:
        return [0, *(end for _, end in self.pieces)]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What all ranks train in a step."""

    samples: tuple[Sample, ...]
    world_size: int
    kernel: str = "softmax"
    num_layers: int = 2
    layers_again: int = 0  # layers of an activation checkpoint
    compiled: bool = False
    parallel: str | None = None  # under "ddp" or "fsdp2", which average gradients
    nodes: tuple[str, ...] | None = None  # of the ranks; default: all are on one

    def split(self) -> list[SplitSample]:
        """The split samples, for all ranks."""
        places = dict.fromkeys(range(self.world_size), 0)
        result = []
        for sample in self.samples:
            pieces = []
            for begin, (rank, end) in zip(sample.begins, sample.pieces, strict=False):
                if len(sample.pieces) > 1:
                    pieces.append(Piece(rank=rank, sequence=places[rank], begin=begin, end=end))
                places[rank] += 1
            if pieces:
                counts = {"num_context": sample.num_context, "num_candidates": sample.num_candidates}
                result.append(SplitSample(pieces=tuple(pieces), **counts))
        return result

    def sequences(self, rank: int | None) -> list[tuple[int, int, int, int, int]]:
        """Sample, begin, end, contextual positions and candidates of a rank's sequences; None: the whole samples."""
        result = []
        for which, sample in enumerate(self.samples):
            history = sample.length - sample.num_candidates
            pieces = sample.pieces if rank is not None else ((None, sample.length),)
            begins = sample.begins if rank is not None else [0]
            for begin, (place, end) in zip(begins, pieces, strict=False):
                if place == rank:
                    context = sample.num_context if begin == 0 else 0
                    result.append((which, begin, end, context, max(end - max(begin, history), 0)))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = (HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * VALUE_DIM)
        self.project_in = nn.Linear(WIDTH, sum(self.sizes), dtype=torch.float64)
        self.project_out = nn.Linear(HEADS * VALUE_DIM, WIDTH, dtype=torch.float64)

    def forward(
        self, rows: Tensor, offsets: Tensor, context: Tensor, candidates: Tensor, pieces: Pieces | None, kernel: str
    ) -> Tensor:
        query, key, value = self.project_in(rows.tanh()).split(self.sizes, -1)
        query = query.unflatten(-1, (HEADS, -1))
        key, value = (part.unflatten(-1, (KEY_HEADS, -1)) for part in (key, value))
        if kernel == CAUSAL:
            attended = VarlenSoftmax(max_length=LONGEST)(query, key, value, offsets, pieces)
        else:
            attended = attend_over_pieces(
                query,
                key,
                value,
                offsets,
                pieces,
                own=lambda q, k, v: KERNELS[kernel].own(q, k, v, offsets, context, candidates),
                other=KERNELS[kernel].other,
            )
        result: Tensor = rows + self.project_out(attended.flatten(1))
        return result


class Model(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH, dtype=torch.float64))
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, rows: Tensor, positions: Tensor, program: Program, *how: Any) -> Tensor:
        state = rows + self.positions[positions]
        size = program.layers_again or 1
        for begin in range(0, len(self.layers), size):
            state = self._stretch(state, begin, size, program, *how)
        return state

    def _stretch(self, state: Tensor, begin: int, size: int, program: Program, *how: Any) -> Tensor:
        def run(state: Tensor) -> Tensor:
            for layer in self.layers[begin : begin + size]:
                state = layer(state, *how, program.kernel)
            return state

        if not program.layers_again:
            return run(state)
        again: Tensor = checkpoint(run, state, use_reentrant=False)
        return again


def train(
    program: Program, rank: int | None, pieces: Pieces | None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Loss, gradients of parameters, outputs and gradients of inputs by sample and position; None: whole samples."""
    torch.manual_seed(5)
    model = Model(program.num_layers)
    sequences = program.sequences(rank)
    generator = torch.Generator().manual_seed(7)
    data = [
        torch.randn(2, sample.length, WIDTH, generator=generator, dtype=torch.float64) for sample in program.samples
    ]
    table = torch.tensor(sequences, dtype=torch.int64).reshape(-1, 5)
    lengths = table[:, 2] - table[:, 1]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    of_rows = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    preceding = torch.zeros(len(sequences), dtype=torch.int64)
    if pieces is not None:
        preceding = pieces.preceding(len(sequences))
    assert preceding.tolist() == [begin for _, begin, *_ in sequences]
    positions = torch.arange(len(of_rows)) - offsets[of_rows] + preceding[of_rows]
    none = torch.empty(0, WIDTH, dtype=torch.float64)
    rows, weights = (
        torch.cat([none, *(data[s][part, begin:end] for s, begin, end, *_ in sequences)]) for part in (0, 1)
    )
    rows.requires_grad_()
    run: Any = model
    if program.parallel == "ddp":
        run = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-4)
    elif program.parallel == "fsdp2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
    run = torch.compile(run, backend="eager") if program.compiled else run
    out = run(rows, positions, program, offsets.int(), table[:, 3], table[:, 4], pieces)
    loss = (out.sin() * weights).sum()
    loss.backward()
    by_sample = {
        (s, position): (out[row].tolist(), rows.grad[row].tolist())
        for (s, begin, end, *_), first in zip(sequences, offsets.tolist(), strict=False)
        for row, position in enumerate(range(begin, end), first)
    }
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    gradients = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    return {"loss": float(loss.detach()), "gradients": gradients, "rows": by_sample}


_groups: dict[tuple[str, ...], PieceGroup] = {}


def on_rank(program: Program) -> dict[str, Any]:
    """In a rank: its part of the step; says how often it communicated too."""
    group = group_of(program.world_size)
    assert group is not None
    own, nodes = dist.get_rank(group), program.nodes or ("one",) * program.world_size
    if nodes not in _groups:
        with mock.patch.dict(os.environ, EVENKEEL_NODE=nodes[own]):
            _groups[nodes] = PieceGroup(group)
    pieces = _groups[nodes].pieces(program.split())
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as posted:
        result = train(program, own, pieces, group)
    sent: list[list[tuple[int, int]]] = []
    for call in posted.call_args_list:
        operations = call.args[0]
        sent.append([(each.peer, each.tensor.numel()) for each in operations if each.op is dist.isend])
    return result | {"sent": sent, "has_pieces": pieces is not None}
