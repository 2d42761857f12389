"""DynamicEmb's own loading of a dump, as it is and with Evenkeel's reader: which rows arrive.

Where its extension is built and there are two GPUs, its tables are trained, dumped and loaded there, once under each
routing. Elsewhere its Python code reads dumps that we wrote, and what it would insert is counted.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.harness.ranks import run_ranks
from benchmarks.peers.checkouts import load_dynamicemb
from trainer_client.embedding.checkpoint import dynamicemb_loads_by_owner, open_checkpoint
from trainer_client.embedding.routing import Routing, as_routing, owners
from trainer_client.embedding.tables import RoutedTable

RANKS, DIM, STEPS = 2, 16, 3
KEYS = np.concatenate([np.arange(6_000) * RANKS, -np.arange(1, 500), np.arange(1, 500) * 2**40]).astype(np.int64)
ROUTINGS = ("roundrobin", "hash_roundrobin")


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both routings, loaded by as many ranks as dumped; on the CPU also by more."""
    peer = load_dynamicemb(options.recsys_examples)
    on_gpus = peer.built and torch.cuda.device_count() >= RANKS
    rows = []
    for routing in ROUTINGS:
        for ranks in (RANKS,) if on_gpus else (RANKS, RANKS + 1):
            with tempfile.TemporaryDirectory() as folder:
                rank = _train_and_load if on_gpus else _read
                if not on_gpus:
                    _write(Path(folder), as_routing(routing))
                found = run_ranks(ranks, rank, str(options.recsys_examples), folder, routing)
            row = {"routing": routing, "dumped_by": RANKS, "loaded_by": ranks, "rows": found[0]["rows"]}
            for how in ("theirs", "evenkeel"):
                row[how] = sum(one[how] for one in found)
                assert how == "theirs" or row[how] == row["rows"], row
            rows.append(row)
    found_all = {"peer": peer.checkout.describe(), "where": "GPUs" if on_gpus else "CPU", "rows": rows}
    table = Table(title=f"Rows of a dump that are on their owner after loading; {peer.checkout}")
    for name in ("routing", "dumped by", "loaded by", "rows", "its own loading", "with Evenkeel's reader"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in ("routing", "dumped_by", "loaded_by", "rows", "theirs", "evenkeel")))
    console.print(table)
    return found_all


def _write(folder: Path, routing: Routing) -> None:
    """A dump in DynamicEmb's format, of SGD."""
    (folder / "items_opt_args.json").write_text(json.dumps({"dist_type": routing.dist_type, "evict_strategy": "LRU"}))
    owner = owners(torch.from_numpy(KEYS), routing, world_size=RANKS).numpy()
    for rank in range(RANKS):
        keys, tail = KEYS[owner == rank], f"rank_{rank}.world_size_{RANKS}"
        keys.tofile(folder / f"items_emb_keys.{tail}")
        np.repeat(keys[:, None], DIM, axis=1).astype(np.float32).tofile(folder / f"items_emb_values.{tail}")
        keys.tofile(folder / f"items_emb_scores.{tail}")


def _read(rank: int, path: str, folder: str, routing: str) -> dict[str, int]:
    """Its `BatchedDynamicEmbeddingTablesV2.load` and the storage's, with what they insert written down."""
    peer = load_dynamicemb(Path(path))
    loading, storage_kind = peer.values, peer.values.DynamicEmbStorage
    counts = {}
    for how, context in (("theirs", nullcontext()), ("evenkeel", dynamicemb_loads_by_owner())):
        inserted: list[torch.Tensor] = []

        def insert(
            _: Any, keys: torch.Tensor, values: torch.Tensor, *__: Any, into: Any = inserted, **___: Any
        ) -> None:
            assert torch.equal(values, keys[:, None].expand(-1, DIM).float())
            into.append(keys)

        storage = storage_kind.__new__(storage_kind)
        storage._state = _state(routing)
        tables = SimpleNamespace(_table_names=["items"], _storage=storage, _admission_counter=None, _scores={})
        with (
            context,
            redirect_stdout(io.StringIO()),  # it tells of each file what it lacks
            mock.patch.object(loading, "_load_key_values", insert),
            mock.patch.object(loading, "collect_table_sizes_for_state"),
            mock.patch.object(storage_kind, "expand_if_need"),
            mock.patch.object(peer.tables, "device_timestamp", return_value=1 << 62),
            mock.patch.object(torch.cuda, "current_device", return_value=0),
            mock.patch.object(torch, "device", return_value=_CPU),  # its batches go to `cuda:0`
        ):
            peer.tables.BatchedDynamicEmbeddingTablesV2.load(tables, folder, optim=False)
        keys = torch.cat(inserted)
        owner = owners(keys, as_routing(routing), world_size=dist.get_world_size())
        counts[how] = int((owner == rank).sum())
    return counts | {"rows": len(KEYS)}


_CPU = torch.device("cpu")


def _state(routing: str) -> Any:
    """What of a table's state its loading reads before it inserts."""
    optimizer = SimpleNamespace(get_opt_args=dict, get_state_dim=lambda _: 0, set_opt_args=lambda _: None)
    return SimpleNamespace(
        optimizer=optimizer,
        evict_strategy="LRU",
        options_list=[SimpleNamespace(dist_type=routing)],
        table_emb_dims_cpu=[DIM],
        key_index_map=SimpleNamespace(num_scores_=1),
        num_tables=1,
        estimated_table_sizes=torch.zeros(1, dtype=torch.int64),
        tables=[SimpleNamespace(tensor=lambda: torch.zeros(1 << 20, 0))],
        collect_table_sizes_flag=False,
    )


def _train_and_load(rank: int, path: str, folder: str, routing: str) -> dict[str, int]:
    """Trains a table of this rank, dumps it, and loads it twice into new ones."""
    load_dynamicemb(Path(path))
    from trainer_client.embedding.tables.dynamicemb import dynamicemb_tables

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    make = dynamicemb_tables(optimizer="adam", learning_rate=0.1)
    declared = RoutedTable(
        name="items", embedding_dim=DIM, features=("item",), num_embeddings=4 * len(KEYS), routing=routing
    )

    def new() -> Any:
        return make(declared, rank, RANKS, device).train()

    keys = torch.from_numpy(KEYS)
    mine = keys[owners(keys, declared.resolved_routing, world_size=RANKS) == rank].to(device)
    trained = new()
    for step in range(STEPS):
        found = trained(mine)
        found.backward(torch.full_like(found, 1.0 + step))
    folders = {name: Path(folder) / name for name in ("dump", "theirs", "evenkeel")}
    for one in folders.values():
        one.mkdir(exist_ok=True)
    dist.barrier()
    trained.dump(folders["dump"])
    plain, ours = new(), new()
    dist.barrier()
    plain.tables.load(str(folders["dump"]), optim=True)
    ours.load(folders["dump"])
    plain.dump(folders["theirs"])
    ours.dump(folders["evenkeel"])
    dist.barrier()
    before = _rows(folders["dump"], rank)
    return {"rows": len(KEYS)} | {how: _same(before, _rows(folders[how], rank)) for how in ("theirs", "evenkeel")}


def _rows(folder: Path, rank: int) -> dict[int, bytes]:
    """Values and optimizer state of each key."""
    return {
        int(key): rows.arrays["values"][at].numpy().tobytes() + rows.arrays["opt_values"][at].numpy().tobytes()
        for rows in open_checkpoint(folder).rows("items", rank)
        for at, key in enumerate(rows.keys)
    }


def _same(before: dict[int, bytes], after: dict[int, bytes]) -> int:
    assert all(before[key] == row for key, row in after.items()), "rows came back changed"
    return len(after)
