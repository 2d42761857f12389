"""`evenkeel checkpoint`: look into checkpoints of routed tables, and re-route them on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainer_client.cli.common import errors_in_a_sentence, progress, show

if TYPE_CHECKING:
    from trainer_client.embedding.checkpoint import Checkpoint, TableRecord

app = typer.Typer(help="Inspect and convert checkpoints of routed embedding tables.", no_args_is_help=True)

_SHOWN = (
    "name", "routing", "world_size", "num_embeddings", "rows", "arrays", "scalars", "format_version", "hash_identity",
)  # fmt: skip
_HEADINGS = ("table", "routing", "ranks", "rows", "rows a rank", "max / mean", "arrays")
_FROM_HELP = "Mode of a DynamicEmb dump that does not name it (without this it counts as roundrobin)."
_SIZES_HELP = "TABLE=ROWS of a continuous table whose dump does not give it; repeatable."
_ROUTING_HELP = "Mode, or TABLE=MODE for one table; repeatable. Modes stay as they are without it."

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
FromRouting = Annotated[str | None, typer.Option(help=_FROM_HELP)]
Sizes = Annotated[list[str] | None, typer.Option("--num-embeddings", help=_SIZES_HELP)]


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    for item in items or []:
        if "=" not in item:
            raise typer.BadParameter(f"{item!r} is not of the form TABLE=VALUE", param_hint=option)
    return dict(item.split("=", 1) for item in items or [])


def _open(path: Path, from_routing: str | None, sizes: list[str] | None) -> Checkpoint:
    rows = _pairs(sizes, "--num-embeddings")
    for table, number in rows.items():
        if not (number.isascii() and number.isdigit()):
            raise typer.BadParameter(f"{table}={number}: give a whole number of rows", param_hint="--num-embeddings")
    from trainer_client.embedding.checkpoint import open_checkpoint

    return open_checkpoint(path, routing=from_routing, num_embeddings={table: int(n) for table, n in rows.items()})


def _plain(record: TableRecord) -> dict[str, Any]:
    plain: dict[str, Any] = {name: value for name, value in asdict(record).items() if name in _SHOWN}
    plain.update(plain.pop("routing"))
    return plain


def _row(record: TableRecord) -> tuple[object, ...]:
    total = sum(record.rows)
    spread = f"{min(record.rows):,} to {max(record.rows):,}" if record.rows else ""
    arrays = ", ".join(f"{n} {s.dtype}{list(s.shape)}" for n, s in sorted(record.arrays.items()))
    ratio = f"{max(record.rows) * record.world_size / total:.3f}" if total else ""
    return record.name, record.routing, record.world_size, f"{total:,}", spread, ratio, arrays


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A torch.distributed.checkpoint directory or a DynamicEmb dump.")],
    check: Annotated[bool, typer.Option("--check", help="Read all: checksums, and each key on its owner.")] = False,
    from_routing: FromRouting = None,
    num_embeddings: Sizes = None,
    as_json: Json = False,
) -> None:
    """Show each table's routing, rows and arrays."""
    with errors_in_a_sentence(1, 1):
        checkpoint = _open(path, from_routing, num_embeddings)
        records = list(checkpoint.records.values())
        for record in records if check else ():
            for rank in range(record.world_size):
                for _ in checkpoint.rows(record.name, rank):
                    pass
    if as_json:
        typer.echo(json.dumps({"path": str(path), "format": checkpoint.format, "tables": [_plain(r) for r in records]}))
    else:
        title = f"{path} ({checkpoint.format}{', every row checked' if check else ''})"
        show(title, _HEADINGS, map(_row, records))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="The checkpoint to read.")],
    target: Annotated[Path, typer.Argument(help="The directory to write.")],
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Number of ranks that will load it.")],
    routing: Annotated[list[str] | None, typer.Option(help=_ROUTING_HELP)] = None,
    seed: Annotated[int, typer.Option(help="Seed of hash_roundrobin.")] = 0,
    to: Annotated[Literal["dcp", "dynamicemb"] | None, typer.Option(help="Format; the source's by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")] = False,
    from_routing: FromRouting = None,
    num_embeddings: Sizes = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint whose rows lie where another routing or number of ranks wants them.

    The target appears when it is complete; what was interrupted is begun again.
    """
    with errors_in_a_sentence(1, 1):
        checkpoint = _open(source, from_routing, num_embeddings)
        from trainer_client.embedding.checkpoint import convert as run

        new = _routings(checkpoint, routing or [], seed)
        with progress("rows") as bar:
            result = run(
                checkpoint,
                target,
                world_size=ranks,
                routing=new,
                target_format=to,
                overwrite=overwrite,
                progress=bar,
            )
    if as_json:
        tables = [_plain(record) for record in result.tables]
        counts = {"rows": result.rows, "moved": result.moved}
        typer.echo(json.dumps({"path": str(target)} | counts | {"tables": tables}))
    else:
        title = f"{target}: {result.rows:,} rows, {result.moved:,} on another rank than before"
        show(title, _HEADINGS, map(_row, result.tables))


def _routings(checkpoint: Checkpoint, modes: list[str], seed: int) -> Any:
    from trainer_client.embedding.routing.ownership import Routing, as_routing, hash_roundrobin

    def named(mode: str) -> Routing:
        return hash_roundrobin(seed) if mode == "hash_roundrobin" else as_routing(mode)

    if len(modes) == 1 and "=" not in modes[0]:
        return named(modes[0])
    by_table = {table: named(mode) for table, mode in _pairs(modes, "--routing").items()}
    for table in by_table:
        if table not in checkpoint.records:
            raise ValueError(f"{checkpoint.path}: no table {table}; it holds {', '.join(checkpoint.records)}")
    return by_table or None
