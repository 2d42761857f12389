"""What `benchmarks.giants_gpu` checks and weighs beside times: exactness, errors in bf16, and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.giants_gpu_data import TimedCost, make_batch
from evenkeel.partitioning.splits import Cuts, Piece, SplitSample
from examples.datasets import SequenceBatch
from examples.hstu.model import Ranker, loss_of
from examples.hstu.training import Trainer
from trainer_client.attention import (
    DenseSilu,
    DenseSoftmax,
    PieceGroup,
    Pieces,
    PointwiseSilu,
    VarlenSoftmax,
    attend_over_pieces,
)
from trainer_client.balancing import BalancedLoader, Balancer
from trainer_client.balancing.batches import BatchSpec, flatten
from trainer_client.balancing.redistribution.cutting import cut

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Pieces | None], Tensor]
GIB = 2**30


def attention(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Largest differences of values and gradients, relative to the largest of the reference, over random pieces."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), PieceGroup()
    heads, dim, longest = (2, 16, 200) if quick or device.type != "cuda" else (4, 256, 3000)
    found: dict[str, Any] = {}
    kinds: dict[str, tuple[torch.dtype, Attend, Attend]] = {}
    softmax, silu = DenseSoftmax(), DenseSilu(divisor=longest)

    def dense(kernel: DenseSoftmax | DenseSilu) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, pieces: Pieces | None) -> Tensor:
            return attend_over_pieces(
                q, k, v, offsets, pieces, own=lambda q, k, v: kernel.own(q, k, v, offsets), other=kernel.other
            )

        return attend

    def triton(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, pieces: Pieces | None) -> Tensor:
        kernel = PointwiseSilu(max_length=longest, divisor=longest)
        return attend_over_pieces(
            q, k, v, offsets, pieces, own=lambda q, k, v: kernel.own(q, k, v, offsets), other=kernel.other
        )

    varlen = VarlenSoftmax(max_length=longest)
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        kinds[f"softmax, {name}"] = (dtype, dense(softmax), dense(softmax))
        kinds[f"silu, {name}"] = (dtype, dense(silu), dense(silu))
        kinds[f"varlen, {name}"] = (dtype, varlen, dense(softmax))
    if device.type == "cuda":
        kinds["varlen, bfloat16"] = (torch.bfloat16, varlen, dense(softmax))
        kinds["triton silu, float32"] = (torch.float32, triton, dense(silu))
        kinds["triton silu, bfloat16"] = (torch.bfloat16, triton, dense(silu))
    for name, (dtype, over_pieces, whole) in kinds.items():
        worst = dict.fromkeys(("out", "query", "key", "value"), 0.0)
        rounds = 3 if dtype == torch.float64 else 2
        try:
            for seed in range(rounds):
                for part, error in _compare(
                    group, over_pieces, whole, dtype, device, rank, ranks, heads, dim, longest, seed
                ).items():
                    worst[part] = max(worst[part], error)
        except Exception as problem:  # on all ranks alike: a kernel that does not compile
            found[name] = f"{type(problem).__name__}: {problem}"[:2000]
            continue
        errors: list[Any] = [None] * ranks
        dist.all_gather_object(errors, worst)
        found[name] = {part: max(each[part] for each in errors) for part in worst}
    return found


def cuts(device: torch.device) -> dict[str, Any]:
    """Batches cut on the device, beside the same on the host: differing tensors, of how many."""
    rng = np.random.default_rng(7)
    spec = BatchSpec(
        rows_per_sample={"items": "num_items", "twice": 2}, sequence={"codes": 2, "items": 1},
        parts={"keys.all": "all", "keys.first": "first"}, objects={"names"},
    )  # fmt: skip
    differing = compared = 0
    for _ in range(20):
        n = int(rng.integers(1, 9))
        lengths = torch.from_numpy(rng.integers(0, 3000, (5, n)))
        keyed = [
            JaggedTensor(torch.randn(int(own.sum()), 3), lengths=own) for own in lengths[:3]
        ]  # whose values have any width
        batch = {
            "num_items": lengths[3], "items": torch.randn(int(lengths[3].sum()), 5).bfloat16(),
            "codes": JaggedTensor(torch.arange(2 * int(lengths[4].sum())), lengths=2 * lengths[4]),
            "keys": {"all": keyed[0], "first": keyed[1], "last": keyed[2]},
            "label": torch.randn(n), "twice": torch.arange(2 * n), "names": [f"sample {i}" for i in range(n)],
        }  # fmt: skip
        more = rng.integers(0, 4, n)
        begins = np.concatenate([[0, *np.sort(rng.integers(0, 3000, count))] for count in more])
        parts = Cuts(samples=np.repeat(np.arange(n), 1 + more), begins=begins.astype(np.int64))
        flat = flatten(batch, spec)
        expected, found = cut(flat, parts), cut(flat.to(device), parts)
        for one, other in zip(expected.tensors, found.tensors, strict=True):
            compared += 1
            differing += not torch.equal(one, other.cpu())
        differing += not torch.equal(expected.lengths_tensor, found.lengths_tensor.cpu())
    return {"tensors": compared, "differing": differing}


def _compare(
    group: PieceGroup,
    over_pieces: Attend,
    whole: Attend,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    ranks: int,
    heads: int,
    dim: int,
    longest: int,
    seed: int,
) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(longest // 4, longest, 3).tolist()
    generator = torch.Generator(device=device).manual_seed(seed)
    # the same on all ranks: they are alike, and draw alike
    data = torch.randn(4, sum(lengths), heads, dim, generator=generator, device=device, dtype=torch.float32)
    samples, places = [], [0] * ranks
    rows: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # of each rank's sequences
    begin = 0
    for number, length in enumerate(lengths):
        cuts = sorted(rng.choice(np.arange(1, length), 1 + number, replace=False).tolist())
        pieces = []
        for since, until in zip([0, *cuts], [*cuts, length], strict=True):
            place = int(rng.integers(ranks))
            pieces.append(Piece(rank=place, sequence=places[place], begin=since, end=until))
            places[place] += 1
            rows[place].append((begin + since, begin + until))
        samples.append(SplitSample(pieces=tuple(pieces)))
        begin += length
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    expected = _values(whole, data, offsets, None, torch.float64 if dtype == torch.float64 else torch.float32)
    own = torch.cat([torch.arange(since, until, device=device) for since, until in [(0, 0), *rows[rank]]])
    sizes = [until - since for since, until in rows[rank]]
    mine = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device=device)
    found = _values(over_pieces, data[:, own], mine, group.pieces(samples), dtype)
    names = ("out", "query", "key", "value")
    return {
        name: float((a.double() - b[own].double()).abs().max() / b.double().abs().max()) if len(own) else 0.0
        for name, a, b in zip(names, found, expected, strict=True)
    }


def _values(attend: Attend, data: Tensor, offsets: Tensor, pieces: Pieces | None, dtype: torch.dtype) -> list[Tensor]:
    query, key, value = (part.to(dtype).requires_grad_() for part in data[:3])
    out = attend(query, key, value, offsets, pieces)
    out.backward(data[3].to(dtype))  # type: ignore[no-untyped-call]
    gradients = [part.grad for part in (query, key, value)]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def gradients(
    trainer: Trainer, own: SequenceBatch, balancer: Balancer, cost: TimedCost, device: torch.device
) -> dict[str, Any]:
    """Relative errors of all gradients together: split, and whole on one rank, against float32 on one.

    Whole samples are computed twice, as they are, and layer by layer as those in pieces: what is compiled together is
    rounded less often.
    """
    batches: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(batches, own)
    model = trainer._bare
    plain = Ranker(replace(trainer.options, kernel="dense", compile=False)).to(device)
    plain.load_state_dict(model.state_dict())
    samples = sum(batch.size for batch in batches)
    results: dict[str, tuple[float, Tensor]] = {}
    for name, whole in (("float32", plain), ("whole", model), ("whole_by_layers", model)):
        whole.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            there, pieces = batch.to(device), None
            if name == "whole_by_layers":  # a sample in one piece
                length = int(batch.sequence_lengths(trainer.options.interleaved)[0])
                one = SplitSample(pieces=(Piece(rank=0, sequence=0, begin=0, end=length),))
                pieces = Pieces([one], 0, None, [0])
            with torch.autocast(device.type, torch.bfloat16, enabled=name != "float32" and device.type == "cuda"):
                loss = loss_of(whole(there) if pieces is None else whole(there, pieces), there)
            (loss / samples).backward()
            total += float(loss.detach())
        results[name] = total, _flat(whole)
    model.zero_grad(set_to_none=True)
    loader = BalancedLoader(
        [own], balancer, cost=cost, memory=trainer.options.tokens(), spec=SequenceBatch.spec(), device=device,
        name="cells",
    )  # fmt: skip
    losses, split = torch.zeros((), device=device), 0
    for batch in loader:
        pieces = trainer.pieces(loader.splits)
        with trainer._mixed():
            logits = trainer.model(batch) if pieces is None else trainer.model(batch, pieces)
            loss = loss_of(logits, batch)
        (loss * loader.loss_scale).backward()  # type: ignore[no-untyped-call]
        losses += loss.detach()
        split += len(loader.splits)
    dist.all_reduce(losses)
    results["split"] = float(losses), _flat(model)
    model.zero_grad(set_to_none=True)
    expected, reference = results["float32"]
    answer: dict[str, Any] = {"split_samples": split, "loss": expected}
    for name in ("whole", "whole_by_layers", "split"):
        answer[f"{name}_gradient_error"] = float((results[name][1] - reference).norm() / reference.norm())
        answer[f"{name}_loss_error"] = abs(results[name][0] - expected) / abs(expected)
    difference = results["split"][1] - results["whole_by_layers"][1]
    answer["split_to_whole_by_layers"] = float(difference.norm() / reference.norm())
    return answer


def _flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])


def memory(
    trainer: Trainer, device: torch.device, *, gather: Callable[[Any], list[Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    """The longest history, whole on one rank and split over two, from peaks at two lengths; then steps at a limit."""
    group, ranks = PieceGroup(), dist.get_world_size()
    trainer.optimizer.zero_grad(set_to_none=True)
    lengths = (49_152, 98_304)
    shares = (0.50, 0.54, 0.58)  # of the history, on the first of two ranks
    whole = [max(gather(_peak(trainer, device, group, length, None))) for length in lengths]
    per_share = {share: gather(_peak(trainer, device, group, lengths[0], share)) for share in shares}
    share = min(shares, key=lambda one: max(per_share[one]))
    split = [max(per_share[share]), max(gather(_peak(trainer, device, group, lengths[1], share)))]
    total = torch.cuda.get_device_properties(device).total_memory
    limit = int(whole[0] * 1.25)
    fits = {name: _fitting(lengths, peaks, limit) for name, peaks in (("whole", whole), ("split", split))}
    on_card = {name: _fitting(lengths, peaks, 0.95 * total) for name, peaks in (("whole", whole), ("split", split))}
    answer: dict[str, Any] = {
        "lengths": lengths, "whole_peak_gib": [peak / GIB for peak in whole], "first_share": share,
        "split_peak_gib": [peak / GIB for peak in split],
        "split_peaks_by_share_gib": {str(one): [peak / GIB for peak in per_share[one]] for one in shares},
        "limit_gib": limit / GIB, "longest_at_limit": fits, "longest_on_card": on_card,
        "longer": on_card["split"] / on_card["whole"], "longer_at_limit": fits["split"] / fits["whole"],
    }  # fmt: skip
    say(f"longest: {answer['longer']:.2f} times longer split; share of the first {share}, ranks {ranks}")
    # Steps at the limit: whole a little below what was predicted and above it, each rank for itself; split below it.
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1.02 * limit / total), device)
    try:
        for name, length in (("whole_below", 0.95 * fits["whole"]), ("whole_above", 1.1 * fits["whole"])):
            answer[name] = {"tokens": int(length), "fits": gather(_tries(trainer, device, group, int(length)))}
        longest = min(0.95 * fits["split"], 131_000)
        _peak(trainer, device, group, int(longest), share)
        answer["split_below"] = {"tokens": int(longest), "fits": True}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return answer


def _fitting(lengths: tuple[int, int], peaks: list[float], memory: float) -> float:
    slope = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
    return lengths[0] + (memory - peaks[0]) / slope


def _tries(trainer: Trainer, device: torch.device, group: PieceGroup, length: int) -> bool:
    try:
        _peak(trainer, device, group, length, None)
    except torch.cuda.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True


def _peak(trainer: Trainer, device: torch.device, group: PieceGroup, length: int, share: float | None) -> float:
    """Most bytes in use by a forward and backward pass of one history, whole, or this rank's part of it."""
    model, pieces = trainer._bare, None
    history = (length - 3) // 2
    if share is not None:
        rank, first = dist.get_rank(), int(history * share)
        cut = 2 + 2 * first
        whole = SplitSample(
            pieces=(
                Piece(rank=0, sequence=0, begin=0, end=cut),
                Piece(rank=1, sequence=0, begin=cut, end=2 + 2 * history + 1),
            ),
            num_candidates=1,
        )
        pieces = group.pieces([whole], contextual=False)
        history = first if rank == 0 else history - first
        batch = make_batch([2 + 2 * history + 1], trainer.options, rank=rank, step=0)
        if rank == 0:  # the candidate is in the last part
            none = torch.zeros(0, dtype=torch.int64)
            batch = replace(
                batch, num_candidates=torch.zeros(1, dtype=torch.int64), candidates=none, labels=torch.zeros(0)
            )
    else:
        batch = make_batch([length], trainer.options, rank=0, step=0)
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    there = batch.to(device)
    with trainer._mixed():
        logits = model(there) if pieces is None else model(there, pieces)
        loss = loss_of(logits, there)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    peak = float(torch.cuda.max_memory_allocated(device))
    model.zero_grad(set_to_none=True)
    return peak
