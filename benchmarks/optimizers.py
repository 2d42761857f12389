"""Every optimizer of torch.optim beside itself: interrupted training with tables against uninterrupted training.

    python -m benchmarks.optimizers --json benchmarks/results/optimizers_cpu.json
    python -m benchmarks.optimizers --device cuda --json benchmarks/results/optimizers_gpu.json

Each optimizer that PyTorch has, in each of its implementations (plain, foreach, fused, capturable) and several
settings, trains a table of each kind for some steps and is saved. From there training goes on uninterrupted, and beside
it from what was loaded, along every way: the same routing, another one on two ranks, a conversion on disk, a DynamicEmb
dump and back, a state dict, and another implementation of the same optimizer. Later steps bring keys that the table had
not seen. At the end values and state must be the same for every key; under another implementation no further off than
twice what two uninterrupted runs of both are apart. It must be so for every optimizer, or `save` must
name what cannot be kept. Needs no TorchRec.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.checkpoint import CheckpointError, convert, open_checkpoint, save
from trainer_client.embedding.checkpoint.live import load_table
from trainer_client.embedding.routing import RoutingLike, hash_roundrobin, owners
from trainer_client.embedding.tables import BlockTable, KeyTable, RoutedEmbeddingCollection, RoutedTable

SIZE, DIM = 48, 6
BEFORE, AFTER = 3, 4
ROUNDING = 1e-5  # of float32 over so many steps
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{"lr": 0.5}, {"lr": 0.5, "weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{"lr": 0.1, "initial_accumulator_value": 0.3}, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}],
    "Adam": [{"lr": 0.05}, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.05, "amsgrad": True, "maximize": True}],
    "Adamax": [{"lr": 0.05}, {"lr": 0.05, "weight_decay": 0.1}],
    "ASGD": [{"lr": 0.05}, {"lr": 0.05, "t0": 2.0, "weight_decay": 0.1}],
    "Muon": [{"lr": 0.05}, {"lr": 0.05, "nesterov": False}],
    "NAdam": [{"lr": 0.05}, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"lr": 0.05}, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "centered": True}],
    "Rprop": [{"lr": 0.03}, {"lr": 0.03, "maximize": True}],
    "SGD": [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "maximize": True},
    ],
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": False},
    "capturable foreach": {"capturable": True, "foreach": True},
}
TABLES: dict[str, RoutingLike] = {"continuous": "continuous", "roundrobin": "roundrobin", "hash": hash_roundrobin(5)}
OTHER: dict[str, RoutingLike] = {"continuous": hash_roundrobin(3), "roundrobin": "continuous", "hash": "roundrobin"}
WAYS = ("load", "other routing", "convert", "dump", "state dict", "other implementation")
NEW_ORDER = ("other routing", "convert", "dump")
"""Ways on which rows come to other ranks, or to other places of theirs."""
MIXES_ROWS = {"Muon"}
"""Optimizers whose step on a row depends on the other rows of its rank; only what was loaded is compared there."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: what was done and how far it was from uninterrupted training."""

    optimizer: str
    settings: dict[str, Any]
    implementation: str
    table: str
    way: str
    outcome: str
    largest_difference: float = 0.0


def declare(routing: RoutingLike) -> RoutedTable:
    return RoutedTable(
        name="t", embedding_dim=DIM, features=("f",), num_embeddings=SIZE, routing=routing, capacity=SIZE + 8
    )


@dataclass(slots=True)
class Run:
    """A table on some ranks, all of them in this process, each with its optimizer."""

    table: RoutedTable
    parts: list[BlockTable | KeyTable]
    optimizers: list[torch.optim.Optimizer]

    @classmethod
    def begin(
        cls, kind: type[torch.optim.Optimizer], arguments: dict[str, Any], routing: RoutingLike, ranks: int, device: str
    ) -> Run:
        """New tables with new optimizers."""
        table = declare(routing)
        build = BlockTable if table.resolved_routing.dist_type == "continuous" else KeyTable
        parts = [build(table, rank=rank, world_size=ranks, device=torch.device(device)) for rank in range(ranks)]
        return cls(table, parts, [kind([part.weight], **arguments) for part in parts])

    def owner(self, keys: Tensor) -> Tensor:
        """Rank of each key."""
        ranks = len(self.parts)
        return owners(keys, self.table.resolved_routing, world_size=ranks, block_size=self.table.rows_per_rank(ranks))

    def train(self, steps: range) -> None:
        """Steps towards a target of each key; later steps know more keys."""
        device = self.parts[0].weight.device
        for step in steps:
            keys = torch.arange(step % 2, 12 + 4 * step, 2, device=device)
            for rank, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
                mine = keys[self.owner(keys) == rank]
                sent = mine - part.first if isinstance(part, BlockTable) else mine
                target = torch.sin(mine[:, None] + torch.arange(DIM, device=device))

                def closure(
                    part: BlockTable | KeyTable = part,
                    optimizer: torch.optim.Optimizer = optimizer,
                    sent: Tensor = sent,
                    target: Tensor = target,
                ) -> float:
                    optimizer.zero_grad()
                    loss = (part(sent) - target).square().sum()
                    loss.backward()
                    return float(loss.detach())

                optimizer.step(closure)

    def load(self, path: Path) -> None:
        """Loads each rank's rows and state."""
        checkpoint = open_checkpoint(path)
        for rank, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            load_table(checkpoint, self.table, part, rank=rank, world_size=len(self.parts), optimizer=optimizer)

    def held(self) -> Tensor:
        """Keys of all ranks, sorted."""
        return torch.cat([part.held_keys() for part in self.parts]).sort().values.cpu()

    def by_key(self, keys: Tensor) -> dict[str, Tensor]:
        """Values, and what the optimizer keeps, row after row of some keys; single numbers of each rank."""
        found: dict[str, Tensor] = {}
        for rank, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            state: dict[str, Any] = {"values": part.weight.detach()} | dict(optimizer.state[part.weight])
            mine = keys[self.owner(keys) == rank]
            at = part.place(mine.to(part.weight.device))
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    rows = found.setdefault(name, torch.zeros(keys.numel(), *value.shape[1:], dtype=torch.float64))
                    rows[torch.searchsorted(keys, mine)] = value[at].cpu().double()
                elif value is not None:
                    found[f"{name} of rank {rank}"] = torch.as_tensor(value).cpu().double()
        return found


def furthest(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference beside the size of what is compared; infinite where something is missing."""
    largest = 0.0
    for name, expected in theirs.items():
        single = name.rsplit(" of rank ", 1)
        others = [value for key, value in mine.items() if key.rsplit(" of rank ", 1)[0] == single[0]]
        if not others or any(value.shape != expected.shape for value in others):
            return float("inf")
        for value in others:
            if value.numel():
                scale = max(1.0, float(expected.abs().max()))
                largest = max(largest, float((value - expected).abs().nan_to_num(float("inf")).max()) / scale)
    return largest


def candidates() -> dict[str, type[torch.optim.Optimizer]]:
    """All optimizers that this PyTorch has."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return {
        n: k
        for n, k in sorted(kinds.items())
        if issubclass(k, torch.optim.Optimizer) and k is not torch.optim.Optimizer
    }


def offered(kind: type[torch.optim.Optimizer], implementation: str) -> bool:
    """Whether an optimizer has an implementation at all."""
    accepted = inspect.signature(kind).parameters
    return implementation == "plain" or all(name in accepted for name in IMPLEMENTATIONS[implementation])


def arguments_of(kind: type[torch.optim.Optimizer], settings: dict[str, Any], implementation: str) -> dict[str, Any]:
    accepted = inspect.signature(kind).parameters
    return settings | {name: value for name, value in IMPLEMENTATIONS[implementation].items() if name in accepted}


def compare(
    name: str,
    settings: dict[str, Any],
    implementation: str,
    table: str,
    device: str,
    folder: Path,
    ways: tuple[str, ...],
) -> Iterator[Case]:
    """All ways of one optimizer, setting, implementation and table."""
    kind = candidates()[name]
    arguments = arguments_of(kind, settings, implementation)
    case = (name, settings, implementation, table)
    try:
        first = Run.begin(kind, arguments, TABLES[table], 1, device)
        first.train(range(BEFORE))
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        yield Case(*case, "train", f"PyTorch refuses: {str(error).splitlines()[0][:100]}")
        return
    collection = RoutedEmbeddingCollection(
        [first.table], device=device, make_table=lambda _table, _rank, _ranks, _device: first.parts[0]
    )
    path = folder / "saved"
    try:
        save(collection, path, optimizer=first.optimizers[0], overwrite=True)
    except CheckpointError as error:
        yield Case(*case, "save", f"refused: {error}")
        return
    kept = copy.deepcopy((first.parts[0].state_dict(), first.optimizers[0].state_dict()))
    at_save, saved_keys = first.by_key(first.held()), first.held()
    first.train(range(BEFORE, BEFORE + AFTER))
    expected, all_keys = first.by_key(first.held()), first.held()
    for way in ways:
        ranks = 2 if way in ("other routing", "convert") else 1
        routing = OTHER[table] if ranks == 2 else TABLES[table]
        other = _other(kind, implementation, device) if way == "other implementation" else implementation
        if other is None:
            continue
        run = Run.begin(kind, arguments_of(kind, settings, other), routing, ranks, device)
        try:
            if way == "state dict":
                run.parts[0].load_state_dict(kept[0])
                run.optimizers[0].load_state_dict(copy.deepcopy(kept[1]))
            else:
                run.load(_brought(path, folder / "brought", way, routing))
            difference = furthest(run.by_key(saved_keys), at_save)
            if not (way in NEW_ORDER and name in MIXES_ROWS):
                run.train(range(BEFORE, BEFORE + AFTER))
                # A block has all its rows from the start, so a row that no key had taken has aged there.
                keys = (
                    saved_keys
                    if (table == "continuous") != (run.table.resolved_routing.dist_type == "continuous")
                    else all_keys
                )
                places = torch.searchsorted(all_keys, keys)
                theirs = {n: v[places] if v.dim() else v for n, v in expected.items()}
                difference = max(difference, furthest(run.by_key(keys), theirs))
        except (ValueError, RuntimeError, KeyError, TypeError, AssertionError) as error:
            yield Case(*case, way, f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}", float("inf"))
            continue
        close = ROUNDING
        if other != implementation:  # two implementations round differently, also where nothing interrupts them
            whole = Run.begin(kind, arguments_of(kind, settings, other), TABLES[table], 1, device)
            whole.train(range(BEFORE + AFTER))
            close = max(close, 2 * furthest(whole.by_key(all_keys), expected))
        outcome = "same bits" if difference == 0 else "equal" if difference < close else "differs"
        yield Case(*case, way, outcome, difference)


def _other(kind: type[torch.optim.Optimizer], implementation: str, device: str) -> str | None:
    """Another implementation that works on a device."""
    for other in reversed(IMPLEMENTATIONS):
        on_gpu = other.startswith("capturable")
        if other != implementation and offered(kind, other) and not (on_gpu and device == "cpu"):
            tiny = torch.zeros(1, device=device, requires_grad=True)
            tiny.grad = torch.ones_like(tiny)
            try:
                kind([tiny], **arguments_of(kind, {}, other)).step()
            except RuntimeError:  # this PyTorch has it for other devices only
                continue
            return other
    return None


def _brought(path: Path, target: Path, way: str, routing: RoutingLike) -> Path:
    """The checkpoint to load, converted where that is part of the way."""
    if way == "convert":
        convert(open_checkpoint(path), target, world_size=2, routing=routing, overwrite=True)
        return target
    if way == "dump":
        dump = target.with_name("dump")
        seeded = open_checkpoint(path).records["t"].routing.seed
        plain = "hash_roundrobin" if seeded else None  # a dump holds no seed
        convert(open_checkpoint(path), dump, world_size=3, routing=plain, target_format="dynamicemb", overwrite=True)
        convert(open_checkpoint(dump), target, world_size=1, target_format="dcp", overwrite=True)
        return target
    return path


def search(
    device: str, *, quick: bool = False, tables: tuple[str, ...] = tuple(TABLES), ways: tuple[str, ...] = WAYS
) -> Iterator[Case]:
    """Everything; quickly: the settings with the most state, and plain implementations only."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in candidates().items():
            settings = SETTINGS.get(name, [{}])
            for chosen in settings[:1] if quick else settings:
                for implementation in ("plain",) if quick else IMPLEMENTATIONS:
                    for table in tables if offered(kind, implementation) else ():
                        yield from compare(name, chosen, implementation, table, device, Path(folder), ways)


def is_fine(case: Case) -> bool:
    """Whether a case ended as it may: the same, refused by name, or an implementation that the device has not."""
    if case.outcome.startswith("PyTorch refuses"):
        return case.optimizer == "SparseAdam" or case.implementation not in ("plain", "foreach")
    return case.outcome in ("same bits", "equal") or case.outcome.startswith("refused: table t: ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="plain implementations with one setting each")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    cases = []
    for case in search(arguments.device, quick=arguments.quick):
        cases.append(case)
        if not is_fine(case):
            print("!", case, flush=True)
    seconds = time.perf_counter() - start
    for name in candidates():
        mine = [case for case in cases if case.optimizer == name]
        counts = Counter(case.outcome.split(":")[0] for case in mine)
        worst = max(case.largest_difference for case in mine)
        print(f"{name:12} {dict(counts)}, largest difference {worst:.1e}")
        for refusal in sorted({case.outcome for case in mine if ":" in case.outcome}):
            print(f"{'':12} {refusal}")
    bad = [case for case in cases if not is_fine(case)]
    print(f"{len(cases)} cases in {seconds:.0f} s, {len(bad)} of them wrong")
    if arguments.json is not None:
        about = {
            "command": f"python -m benchmarks.optimizers --device {arguments.device} --json FILE",
            "machine": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cases": len(cases),
            "wrong": len(bad),
            "seconds": round(seconds, 1),
        }
        text = json.dumps({"about": about, "cases": [asdict(case) for case in cases]}, indent=None)
        arguments.json.write_text(text.replace('{"optimizer"', '\n{"optimizer"') + "\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
