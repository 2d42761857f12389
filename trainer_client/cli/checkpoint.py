"""`evenkeel checkpoint`: look into checkpoints of routed tables, and re-route them on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from trainer_client.embedding.checkpoint import TableRecord
    from trainer_client.embedding.checkpoint.convert import Checkpoint

app = typer.Typer(help="Inspect and convert checkpoints of routed embedding tables.", no_args_is_help=True)

_SHOWN = (
    "name", "routing", "world_size", "num_embeddings", "rows", "arrays", "scalars", "format_version", "hash_identity",
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
FromRouting = Annotated[
    str | None,
    typer.Option(help="Mode of a DynamicEmb dump that does not name it (without this it counts as roundrobin)."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--num-embeddings", help="TABLE=ROWS of a continuous table whose dump does not give it; repeatable."),
]


def _fail(message: str) -> typer.Exit:
    Console(stderr=True).print(f"[red]error:[/red] {message}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    pairs = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{item!r} is not of the form TABLE=VALUE", param_hint=option)
        pairs[name] = value
    return pairs


def _sizes(items: list[str] | None) -> dict[str, int]:
    sizes = {}
    for table, rows in _pairs(items, "--num-embeddings").items():
        if not rows.isascii() or not rows.isdigit():
            raise typer.BadParameter(f"{table}={rows}: give a whole number of rows", param_hint="--num-embeddings")
        sizes[table] = int(rows)
    return sizes


def _open(path: Path, from_routing: str | None, sizes: list[str] | None) -> Checkpoint:
    try:
        from trainer_client.embedding.checkpoint import open_checkpoint
    except ImportError as error:
        raise _fail(f"checkpoints need PyTorch, which is not installed ({error})") from error
    try:
        return open_checkpoint(path, routing=from_routing, num_embeddings=_sizes(sizes))
    except (ValueError, OSError) as error:
        raise _fail(str(error)) from error


def _plain(record: TableRecord) -> dict[str, Any]:
    plain = {name: value for name, value in asdict(record).items() if name in _SHOWN}
    plain.update(plain.pop("routing"))
    return plain


def _print(records: list[TableRecord], title: str) -> None:
    table = Table("table", "routing", "ranks", "rows", "rows a rank", "max / mean", "arrays", title=title)
    for record in records:
        total = sum(record.rows)
        spread = f"{min(record.rows):,} to {max(record.rows):,}" if record.rows else ""
        arrays = ", ".join(f"{n} {s.dtype}{list(s.shape)}" for n, s in sorted(record.arrays.items()))
        ratio = f"{max(record.rows) * record.world_size / total:.3f}" if total else ""
        table.add_row(record.name, str(record.routing), str(record.world_size), f"{total:,}", spread, ratio, arrays)
    Console().print(table)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A torch.distributed.checkpoint directory or a DynamicEmb dump.")],
    check: Annotated[
        bool, typer.Option("--check", help="Read every row: checksums, and each key on its owner.")
    ] = False,
    from_routing: FromRouting = None,
    num_embeddings: Sizes = None,
    as_json: Json = False,
) -> None:
    """Show each table's routing, rows and arrays."""
    checkpoint = _open(path, from_routing, num_embeddings)
    records = list(checkpoint.records.values())
    if check:
        try:
            for record in records:
                for rank in range(record.world_size):
                    for _ in checkpoint.rows(record.name, rank):
                        pass
        except (ValueError, OSError) as error:
            raise _fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps({"path": str(path), "format": checkpoint.format, "tables": [_plain(r) for r in records]}))
    else:
        _print(records, f"{path} ({checkpoint.format}{', every row checked' if check else ''})")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="The checkpoint to read.")],
    target: Annotated[Path, typer.Argument(help="The directory to write.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks that will load it.")],
    routing: Annotated[
        list[str] | None,
        typer.Option(help="Mode, or TABLE=MODE for one table; repeatable. Modes stay as they are without it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of hash_roundrobin.")] = 0,
    to: Annotated[str | None, typer.Option(help="Format: dcp or dynamicemb; the source's by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")] = False,
    from_routing: FromRouting = None,
    num_embeddings: Sizes = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint whose rows lie where another routing or number of ranks wants them.

    The target appears when it is complete; what was interrupted is begun again.
    """
    checkpoint = _open(source, from_routing, num_embeddings)
    if to not in (None, "dcp", "dynamicemb"):
        raise typer.BadParameter(f"{to!r} is neither dcp nor dynamicemb", param_hint="--to")
    from trainer_client.embedding.checkpoint import convert as run
    from trainer_client.embedding.routing import Routing

    def named(mode: str) -> Routing:
        return Routing(dist_type=cast(Any, mode), seed=seed if mode == "hash_roundrobin" else 0)

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    try:
        chosen: Any = None
        if routing and len(routing) == 1 and "=" not in routing[0]:
            chosen = named(routing[0])
        elif routing:
            chosen = {table: named(mode) for table, mode in _pairs(routing, "--routing").items()}
            unknown = next((table for table in chosen if table not in checkpoint.records), None)
            if unknown is not None:
                raise _fail(f"{source}: no table {unknown}; it holds {', '.join(checkpoint.records)}")
        with bar:
            task = bar.add_task("rows", total=None)
            result = run(
                checkpoint,
                target,
                world_size=ranks,
                routing=chosen,
                target_format=cast(Literal["dcp", "dynamicemb"] | None, to),
                overwrite=overwrite,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except (ValueError, OSError) as error:
        raise _fail(str(error)) from error
    if as_json:
        tables = [_plain(record) for record in result.tables]
        counts = {"rows": result.rows, "moved": result.moved}
        typer.echo(json.dumps({"path": str(target)} | counts | {"tables": tables}))
    else:
        _print(list(result.tables), f"{target}: {result.rows:,} rows, {result.moved:,} on another rank than before")
