"""What ranks send for row-wise tables with hot rows and without: batches of all ranks, replayed and counted.

    python -m benchmarks.hot_rows [--json benchmarks/results/hot_rows.json]

The first tables are those of the histories of `examples/dlrmv4`, with what is published of Yambda-5B: rows, users in a
rank's batch, the mean history, and owners that are asked for 2.8 and 1.3 times the mean. Then traces with drift and
sessions. Hot rows are chosen from the first half of the steps, and bytes counted in the second.

"All" is the exchange without deduplication, as TorchRec's of sequences; FlexShard's 85 % are of such a one, as far as
is public. "Once" sends each key of a rank once: a row there, its gradient back. "Link" is what a rank, or a node where
there are several, sends on average, with what hot rows send beside All2Alls.

No way that leaves the weights exact sends less than the floors. Say the links S look a row up in a step, and D in the
next step that any does. The first link to know the row after S needs the gradients of all others of S, a row each; all
others of D cannot know it yet, and get a row each afterwards: |S| + |D| - 2 rows, or - 1 where S and D share no link.
Over the steps that is 2 (k - 1) for each step in which k links look it up, and the odd ones: the floor of rows that may
live anywhere, and move with their optimizer's state for nothing. Where a row has a home whose optimizer takes the
steps, each other link needs the row and sends a gradient: 2 k, or 2 (k - 1) if the home is among the k. If links are
ranks, "once" sends just that, keys apart: hot rows save nothing in all, they spread what the heaviest owner sends. If
links are nodes, "once" sends a row for each rank, so there is something to save. Floors count no keys.
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


def floors(codes: Array, homes: Array, links: int, steps: int) -> tuple[int, int]:
    """The least rows that links send: where rows have homes, and where they may be anywhere.

    Args:
        codes: (touches,) different ones, ascending: (key · steps + step) · links + the link that looks it up.
        homes: (touches,) the link where the key's row lives.
        links: How many there are.
        steps: The same.
    """
    touch, link = np.divmod(codes, links)
    touches, at, times = np.unique(touch, return_inverse=True, return_counts=True)
    order = np.lexsort((at, link, touch // steps))
    again = np.flatnonzero((np.diff(at[order]) == 1) & (np.diff(link[order]) == 0))
    key = touches // steps
    follows, shared = np.diff(key) == 0, np.unique(at[order][again])
    shared = shared[follows[shared]]
    return 2 * int((homes != link).sum()), 2 * int((times - 1).sum()) + int(follows.sum()) - len(shared)


def measure(stream: Stream, ranks: int, per_node: int) -> dict[str, Any]:
    """Megabytes that a rank sends in All2Alls, the heaviest owner over the mean, and megabytes of a link, each way."""
    table, half = stream.table, len(stream.steps) // 2
    sampler = KeySampler([table.name], max_references=200_000_000)
    for keys in (keys for step in stream.steps[:half] for keys in step):
        sampler.observe([(keys, np.array([[0, 0, len(keys)]]))], 1)
    keys, wanted = (torch.from_numpy(each) for each in heavy_hitters(sampler.traces()[table.name]))
    choice = choose_hot_rows(table, keys, wanted, world_size=ranks, ranks_per_node=per_node)
    hot = np.sort(choice.keys.numpy())
    link_size = per_node if per_node < ranks else 1
    links, steps, codes = ranks // link_size, len(stream.steps) - half, []
    asked = {name: np.zeros((ranks, ranks)) for name in ("all", "all_hot", "once", "once_hot")}
    for number, step in enumerate(stream.steps[half:]):
        for rank, lookups in enumerate(step):
            unique, times = np.unique(lookups, return_counts=True)
            owner, cold = owners_of(table, unique, ranks), ~np.isin(unique, hot, assume_unique=True)
            for name, weight in zip(asked, (times, times * cold, np.ones_like(times), cold), strict=True):
                asked[name][rank] += np.bincount(owner, weight, ranks)
            codes.append((unique * steps + number) * links + rank // link_size)
    row = table.embedding_dim * table.dtype.itemsize
    mega = dict.fromkeys(asked, 1e-6 * (2 * row + 8) / ranks / steps)
    mega["all"] = mega["all_hot"] = mega["all"] * stream.times
    touched = np.unique(np.concatenate(codes))
    least = floors(touched, owners_of(table, touched // links // steps, ranks) // link_size, links, steps)
    # Beside the All2All, all hot rows come to even stretches and go around a ring of all ranks; their gradients too.
    ends = np.searchsorted(np.sort(owners_of(table, hot, ranks) // link_size), np.arange(links + 1))
    even = np.linspace(0, len(hot), links + 1)
    staying = np.maximum(np.minimum(ends[1:], even[1:]) - np.maximum(ends[:-1], even[:-1]), 0).sum()
    ring = 2e-6 * row * (len(hot) * (ranks - 1) / ranks + (len(hot) - staying) / links)
    by_link = {name: each.reshape(links, link_size, links, link_size).sum((1, 3)) for name, each in asked.items()}
    apart = {name: mega[name] * link_size * float(each.sum() - np.trace(each)) for name, each in by_link.items()}
    return {
        "stream": table.name, "ranks": ranks, "nodes": ranks // per_node, "keys_seen": len(keys),
        "hot_rows": len(hot), "hot_memory_mb": choice.memory_bytes / 1e6,
        "all_to_all_mb": {name: float(mega[name] * (each.sum() - np.trace(each))) for name, each in asked.items()},
        "heaviest_owner": {name: float(each.sum(0).max() * ranks / each.sum()) for name, each in asked.items()},
        "link_mb": {
            "all": apart["all"], "once": apart["once"], "once_hot": apart["once_hot"] + ring,
            "floor_of_homes": 1e-6 * row * least[0] / links / steps, "floor": 1e-6 * row * least[1] / links / steps,
        },
    }  # fmt: skip


def owners_of(table: RoutedTable, keys: Array, ranks: int) -> Array:
    owned: Array = table.route(torch.from_numpy(keys), ranks)[0].numpy()
    return owned


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Replays every stream and prints the table."""
    cells = [(ranks, source) for ranks in WORLDS for source in (*MADE, *TRACES)]
    rows = [measure(stream_of(source, ranks), ranks, WORLDS[ranks]) for ranks, source in track(cells, "streams")]
    shown = Table("stream", "ranks", "hot rows", "MB", "All2All", "once", "hot", "owner", "once", "hot", "link", "once",
                  "hot", "of homes", "floor")  # fmt: skip
    for row in rows:
        sent, owner = row["all_to_all_mb"], row["heaviest_owner"]
        numbers = [row["hot_memory_mb"], *(sent[way] for way in ("all", "once", "once_hot"))]
        numbers += [*(owner[way] for way in ("all", "once", "once_hot")), *row["link_mb"].values()]
        shown.add_row(row["stream"], str(row["ranks"]), str(row["hot_rows"]), *(f"{number:.2f}" for number in numbers))
    Console(width=170).print(shown)
    write(json_path, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
