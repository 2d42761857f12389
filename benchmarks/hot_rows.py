"""What ranks send for row-wise tables with hot rows and without: batches of all ranks, replayed and counted.

    python -m benchmarks.hot_rows [--json benchmarks/results/hot_rows.json]

The first tables are those of the histories of `examples/dlrmv4`, with what is published of Yambda-5B: rows, users in a
rank's batch, the mean history, and owners that are asked for 2.8 and 1.3 times the mean. Then traces with drift and
sessions. Hot rows are chosen from the first half of the steps, and bytes counted in the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.results import write
from benchmarks.references.key_traces import TRACES
from evenkeel.key_statistics import KeySampler, heavy_hitters
from examples.datasets import Keys
from examples.dlrmv4.stream import POPULARITY, ROWS, SKEW, rows_of
from trainer_client.embedding.tables import RoutedTable, choose_hot_rows

Array = npt.NDArray[Any]

WORLDS = {8: 8, 64: 8}  # by number of ranks, those of a node
STEPS = {8: 20, 64: 6}  # of which half are observed on all ranks
LOOKUPS = 16_384  # of a rank in a step of a trace
SAMPLES, USERS, EVENTS, KNOWN = 1_024, 21, 2_664, 900  # of a rank; users, and the events and items of each
MADE = ("item_id", *SKEW)
CATALOGUE = Keys(count=ROWS["item_id"], exponent=POPULARITY)


@dataclass(frozen=True)
class Stream:
    """The batches of a table.

    Attributes:
        table: The table.
        steps: By step, (ranks, lookups) keys.
        times: How often each of these lookups is there.
    """

    table: RoutedTable
    steps: list[Array]
    times: float = 1.0


def made(name: str, ranks: int) -> Stream:
    """A table of histories."""
    rows, draw, steps = ROWS[name], np.random.default_rng(ranks), []
    for _ in range(STEPS[ranks]):
        known = CATALOGUE.draw(draw, ranks * USERS * KNOWN).reshape(ranks, USERS, KNOWN)
        at = (draw.random((ranks, USERS, EVENTS)) ** 3 * KNOWN).astype(np.int64)
        items = torch.from_numpy(np.take_along_axis(known, at, 2).reshape(ranks, -1))
        steps.append((rows_of(items, name, rows) if name in SKEW else items).numpy())
    table = RoutedTable(name=name, embedding_dim=512, features=("f",), num_embeddings=rows, routing="continuous")
    return Stream(table, steps, SAMPLES / USERS)


def of_lookups(name: str, steps: Iterator[Array], ranks: int) -> Stream:
    """A trace's steps, dealt to the ranks."""
    table = RoutedTable(name=name, embedding_dim=128, features=("f",), num_embeddings=1_000_000)
    return Stream(table, [step.reshape(ranks, -1) for step in steps])


def stream_of(source: str, ranks: int) -> Stream:
    if source in MADE:
        return made(source, ranks)
    return of_lookups(source, TRACES[source](np.random.default_rng(ranks), STEPS[ranks], ranks * LOOKUPS), ranks)


def measure(stream: Stream, ranks: int, per_node: int) -> dict[str, Any]:
    """Megabytes that a rank sends in All2Alls, and the heaviest owner over the mean, of each way."""
    table, half = stream.table, len(stream.steps) // 2
    sampler = KeySampler([table.name], max_references=200_000_000)
    for keys in (keys for step in stream.steps[:half] for keys in step):
        sampler.observe([(keys, np.array([[0, 0, len(keys)]]))], 1)
    keys, wanted = (torch.from_numpy(each) for each in heavy_hitters(sampler.traces()[table.name]))
    choice = choose_hot_rows(table, keys, wanted, world_size=ranks, ranks_per_node=per_node)
    hot = np.sort(choice.keys.numpy())
    asked = {name: np.zeros((ranks, ranks)) for name in ("all", "all_hot", "once", "once_hot")}
    for step in stream.steps[half:]:
        for rank, lookups in enumerate(step):
            unique, times = np.unique(lookups, return_counts=True)
            owner = table.route(torch.from_numpy(unique), ranks)[0]
            cold = ~np.isin(unique, hot, assume_unique=True)
            for name, weight in zip(asked, (times, times * cold, np.ones_like(times), cold), strict=True):
                asked[name][rank] += np.bincount(owner.numpy(), weight, ranks)
    way = 2 * table.embedding_dim * table.dtype.itemsize + 8
    mega = {name: 1e-6 * way / ranks / (len(stream.steps) - half) for name in asked}
    mega["all"] = mega["all_hot"] = mega["all"] * stream.times
    return {
        "stream": table.name, "ranks": ranks, "nodes": ranks // per_node, "keys_seen": len(keys),
        "hot_rows": len(hot), "hot_memory_mb": choice.memory_bytes / 1e6,
        "all_to_all_mb": {name: float(mega[name] * (each.sum() - np.trace(each))) for name, each in asked.items()},
        "heaviest_owner": {name: float(each.sum(0).max() * ranks / each.sum()) for name, each in asked.items()},
        "busiest_link_mb": {"once": choice.without.busiest_link_bytes / 1e6,
                            "once_hot": choice.expected.busiest_link_bytes / 1e6},
    }  # fmt: skip


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Replays every stream and prints the table."""
    cells = [(ranks, source) for ranks in WORLDS for source in (*MADE, *TRACES)]
    rows = [measure(stream_of(source, ranks), ranks, WORLDS[ranks]) for ranks, source in track(cells, "streams")]
    shown = Table("stream", "ranks", "hot rows", "MB", "All2All", "once", "hot", "owner", "once", "hot", "link", "hot")
    for row in rows:
        sent, owner, link = row["all_to_all_mb"], row["heaviest_owner"], row["busiest_link_mb"]
        numbers = [row["hot_memory_mb"], *(sent[way] for way in ("all", "once", "once_hot"))]
        numbers += [*(owner[way] for way in ("all", "once", "once_hot")), *link.values()]
        shown.add_row(row["stream"], str(row["ranks"]), str(row["hot_rows"]), *(f"{number:.2f}" for number in numbers))
    Console(width=140).print(shown)
    write(json_path, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
