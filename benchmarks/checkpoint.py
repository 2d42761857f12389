"""Converting a checkpoint to another routing beside a plain copy of its files: rows per second and peak memory.

python -m benchmarks.checkpoint --json benchmarks/results/checkpoint.json
"""

import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def write_dump(path: Path, *, rows: int, dim: int, world_size: int) -> None:
    """A DynamicEmb dump of roundrobin keys: values and an optimizer state of the same width."""
    path.mkdir()
    (path / "items_opt_args.json").write_text(json.dumps({"dist_type": "roundrobin", "num_embeddings": rows}))
    block = np.random.default_rng(0).random((1 << 16, dim), dtype=np.float32)
    for rank in range(world_size):
        tail = f".rank_{rank}.world_size_{world_size}"
        keys = np.arange(rank, rows, world_size, dtype=np.int64)
        keys.tofile(path / f"items_emb_keys{tail}")
        for array in ("values", "opt_values"):
            with (path / f"items_emb_{array}{tail}").open("wb") as file:
                for start in range(0, keys.size, len(block)):
                    block[: keys.size - start].tofile(file)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def convert_here(source: Path, target: Path, ranks: int, target_format: str) -> dict[str, float]:
    """Converts in this process, and says how long it took and how much memory it added."""
    from trainer_client.embedding.checkpoint import convert, open_checkpoint

    checkpoint: Any = open_checkpoint(source)
    before = peak_mib()
    start = time.perf_counter()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"to {target_format}", total=None)
        convert(
            checkpoint,
            target,
            world_size=ranks,
            routing="hash_roundrobin",
            target_format=target_format,  # type: ignore[arg-type]
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return {"seconds": time.perf_counter() - start, "added_mib": peak_mib() - before, "peak_mib": peak_mib()}


def main(
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 10_000_000,
    dim: Annotated[int, typer.Option(help="Columns; the optimizer state has as many.")] = 16,
    ranks: Annotated[int, typer.Option(help="Ranks before; after there are 6.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="A twentieth of the rows.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where to put the files.")] = None,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures both formats."""
    if child:
        source, target, target_format = child.split("|")
        typer.echo(json.dumps(convert_here(Path(source), Path(target), 6, target_format)))
        return
    rows //= 20 if quick else 1
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        root = Path(scratch)
        write_dump(root / "old", rows=rows, dim=dim, world_size=ranks)
        size = sum(file.stat().st_size for file in (root / "old").iterdir())
        start = time.perf_counter()
        shutil.copytree(root / "old", root / "copy")
        results.append({"what": "copy of the files", "seconds": time.perf_counter() - start})
        shutil.rmtree(root / "copy")
        for target_format in ("dynamicemb", "dcp"):
            # A process of its own, so that its peak memory is its own.
            job = "|".join([str(root / "old"), str(root / "new"), target_format])
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.checkpoint", "--child", job],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            results.append({"what": f"convert to {target_format}"} | json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(root / "new")
    table = Table("", "s", "M rows/s", "times a copy", "MiB added", title=f"{rows:,} rows, {size / 2**30:.2f} GiB")
    for row in results:
        row["rows_per_second"] = rows / row["seconds"]
        row["times_a_copy"] = row["seconds"] / results[0]["seconds"]
        added = f"{row['added_mib']:.0f}" if "added_mib" in row else ""
        speed, times = f"{row['rows_per_second'] / 1e6:.2f}", f"{row['times_a_copy']:.1f}"
        table.add_row(row["what"], f"{row['seconds']:.1f}", speed, times, added)
    Console().print(table)
    if json_path:
        about = {
            "rows": rows, "dim": dim, "bytes": size, "ranks": ranks, "ranks_after": 6, "machine": platform.machine(),
            "python": platform.python_version(), "command": "python -m benchmarks.checkpoint " + " ".join(sys.argv[1:]),
        }  # fmt: skip
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
