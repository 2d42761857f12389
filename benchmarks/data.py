"""What balancing and routing make of a data set that you have: figures from a public file as it is published.

    python -m benchmarks.data lengths ml-20m --ranks 8,64 --samples 32
    python -m benchmarks.data keys ml-20m --ranks 8,64 --samples 32
    python -m benchmarks.data keys day_0.gz --ranks 8,64 --samples 1024 --json out/criteo_keys.json
    python -m benchmarks.data generate Gowalla out/gowalla

`lengths` forms batches of users whose histories are the sequences, and prints max/mean of the ranks' loads as loaded
and balanced. No assignment of whole samples comes below `bound`; `saved` is the share of a step's time that balancing
saves where the step follows the load, `moved` the share of the tokens that change rank.

`keys` prints how the keys of a batch spread over the ranks that own them, under the three routings: keys of the fullest
rank over the mean, for all keys (`raw`) and for those that are left when each rank asks for a key once
(`deduplicated`). `best` is what no routing can beat, since a key has one owner.

`generate` writes a small file that only looks like a published one, to try this out.

Known are MovieLens (1M to 32M), KuaiRand, Gowalla, Amazon's reviews (2014, 2018, 2023), Yambda (needs pyarrow) and, for
keys, Criteo's click logs. Where to download them, and what is printed: docs/start/gain.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.data_figures import COSTS, Keys, key_skews, keys_of_histories, keys_of_rows, load_figures
from benchmarks.data_generated import WRITERS, generate
from evenkeel.partitioning import strategies
from examples.datasets import identify, read_criteo, read_histories
from examples.datasets.tables import Watch

LENGTH_COLUMNS = (
    ("ranks", "ranks", "{:d}"), ("samples", "samples", "{:d}"), ("cost", "cost", "{}"), ("before", "before", "{:.3f}"),
    ("after", "after", "{:.3f}"), ("bound", "bound", "{:.3f}"), ("saved", "saved", "{:.1%}"),
    ("moved", "moved_share", "{:.1%}"),
)  # fmt: skip
KEY_COLUMNS = (
    ("ranks", "ranks", "{:d}"), ("samples", "samples", "{:d}"), ("keys a batch", "keys", "{:,.0f}"),
    ("routing", "routing", "{}"), ("raw", "raw", "{:.3f}"), ("best", "raw_best", "{:.3f}"),
    ("left", "left", "{:.1%}"), ("deduplicated", "deduplicated", "{:.3f}"), ("best", "deduplicated_best", "{:.3f}"),
)  # fmt: skip


def main() -> None:
    options = parse_arguments()
    try:
        if options.command == "generate":
            print(f"generated, not published: {generate(options.name, options.folder, seed=options.seed)}")
            return
        result = lengths(options) if options.command == "lengths" else keys(options)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"data: {error}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns the loads of a data set's batches."""
    with reading() as watch:
        data = read_histories(options.path, watch=watch)
    about = describe(options, events=len(data.items), users=len(data.users), items=data.num_items)
    spread = {f"p{percent}": int(found) for percent, found in percentiles(data.lengths).items()}
    about["events_of_a_user"] = {"mean": float(data.lengths.mean()), **spread, "longest": int(data.lengths.max())}
    rows = load_figures(
        data.lengths, ranks=options.ranks, samples=options.samples, batches=options.batches,
        max_length=options.max_length, strategy=options.strategy, seed=options.seed,
    )  # fmt: skip
    tell(about, LENGTH_COLUMNS, rows)
    return about | {"rows": rows}


def keys(options: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns the spread of a data set's keys."""
    found: Keys
    with reading() as watch:
        if identify(options.path) == "Criteo":
            wanted = max(options.ranks) * max(options.samples) * options.batches
            found = keys_of_rows(read_criteo(options.path, rows=wanted, watch=watch))
            about = describe(options, rows_read=len(found.offsets) - 1, features=found.num_features)
        else:
            data = read_histories(options.path, watch=watch)
            found = keys_of_histories(data, max_length=options.max_length, seed=options.seed)
            about = describe(options, events=len(data.items), users=len(data.users), items=data.num_items)
    rows = key_skews(found, ranks=options.ranks, samples=options.samples, batches=options.batches)
    tell(about, KEY_COLUMNS, rows)
    return about | {"rows": rows}


def describe(options: argparse.Namespace, **figures: int) -> dict[str, Any]:
    """What the figures are of."""
    command = "python -m benchmarks.data " + " ".join(sys.argv[1:])
    return {"data": identify(options.path), "path": options.path.name, "command": command, **figures}


def percentiles(values: Any) -> dict[int, float]:
    """Of some values, at a few places."""
    import numpy as np

    places = (50, 90, 99)
    return dict(zip(places, np.percentile(values, places).tolist(), strict=True))


@contextmanager
def reading() -> Iterator[Watch]:
    """A progress bar of the files that are read; none where the output is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        tasks: dict[Path, Any] = {}

        def watch(path: Path, read: int) -> None:
            if path not in tasks:
                tasks[path] = progress.add_task(path.name, total=path.stat().st_size)
            progress.update(tasks[path], completed=read)

        yield watch


def tell(about: dict[str, Any], columns: tuple[tuple[str, str, str], ...], rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    parts = []
    for name, value in about.items():
        if isinstance(value, int):
            parts.append(f"{value:,} {name.replace('_', ' ')}")
        elif isinstance(value, dict):
            parts.append(f"{name.replace('_', ' ')}: " + ", ".join(f"{k} {v:,.0f}" for k, v in value.items()))
    table = Table(title=f"{about['data']} ({about['path']}): " + "; ".join(parts), title_justify="left")
    for title, _, _ in columns:
        table.add_column(title, justify="left" if title in ("cost", "routing") else "right")
    for row in rows:
        table.add_row(*(form.format(row[key]) for _, key, form in columns))
    Console(width=max(100, Console().width)).print(table)


def numbers(text: str) -> list[int]:
    """Whole numbers above zero, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not such as 8 or 8,64")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("lengths", "loads of ranks before and after balancing"),
                        ("keys", "keys per rank under the three routings")):  # fmt: skip
        command = commands.add_parser(name, help=about, description=about)
        add = command.add_argument
        add("path", type=Path, help="folder or file of the data set, as published")
        add("--ranks", type=numbers, default=[8, 64], help="numbers of ranks, such as 8,64")
        add("--samples", type=numbers, default=[32], help="samples of a rank in a batch, such as 32,128")
        add("--batches", type=int, default=50, help="global batches to look at")
        add("--max-length", type=int, default=4096, help="older events of a user are left out")
        add("--seed", type=int, default=0, help="of the order of the users")
        add("--json", type=Path, help="where to write the figures")
        if name == "lengths":
            add("--strategy", choices=strategies(), default="minimal_move")
    command = commands.add_parser("generate", help="write a small file in a published format")
    command.add_argument("name", choices=list(WRITERS))
    command.add_argument("folder", type=Path)
    command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("batches", "max_length"):
        if getattr(options, name, 1) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; use at least 1")
    if options.command == "keys" and max(options.ranks) > 4096:
        parser.error(f"--ranks is {max(options.ranks)}; use at most 4096")
    return options


__all__ = ["COSTS", "main"]

if __name__ == "__main__":
    main()
