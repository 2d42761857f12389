"""Plans for DLRMv4's tables, and training that jobs of other sizes go on with, into a result file.

    python -m benchmarks.dlrmv4 plans 8                # ours and TorchRec's; and 16, and 32
    python -m benchmarks.dlrmv4 train planned          # and routed
    python -m benchmarks.dlrmv4 train planned --scale wide --file benchmarks/results/dlrmv4_h100.json

`train` is of `examples/dlrmv4/train.py`, on the GPUs of this machine, else on 4 ranks with Gloo: once without a break,
once as far as a checkpoint in the middle, from which jobs of other numbers of ranks go on. `apart` is how far what they
hold in the end, weights and all state of optimizers, is from the end without a break: the Euclidean distance over that
between the middle and this end; `apart_without_break`, of a second job without a break, which a GPU's kernels, that add
in no order, bring elsewhere. Step times are medians, of ranks that share the cores of this machine.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks.harness.results import RESULTS, ROOT, provenance, write
from examples.dlrmv4.plan import compare, shown

MIDDLE, END, BATCH = 24, 48, 32  # steps; samples of one
FEW = 6  # steps of which losses are means, and that are not timed
File = Annotated[Path, typer.Option(help="To put the figures into.")]
State = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # by name, keys and their rows
NOTHING = torch.empty(0, dtype=torch.int64), torch.empty(0, 1)
app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def plans(ranks: int, file: File = RESULTS / "dlrmv4.json") -> None:
    """Plans for as many H100 and H200."""
    made = compare(ranks=[ranks])
    print(shown(made))
    cells = [cell for cell in _known(file).get("cells", []) if cell["ranks"] != ranks]
    cells += [{"commit": provenance()["commit"], **cell} for cell in made["cells"]]
    write(file, _known(file) | made | {"cells": sorted(cells, key=lambda cell: int(cell["ranks"]))})


@app.command()
def train(
    tables: Literal["planned", "routed"],
    scale: Literal["small", "wide"] = "small",
    file: File = RESULTS / "dlrmv4.json",
) -> None:
    """Training without a break, and that which others went on with."""
    ranks = torch.cuda.device_count() or 4
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder), tables, scale, ranks, {ranks, 1} if torch.cuda.is_available() else {1, 2, 8})
    print(json.dumps(row, indent=1))
    trained = _known(file).get("training", {}) | {f"{tables} {scale}": row}
    write(file, _known(file) | {"training": trained})


def measure(folder: Path, tables: str, scale: str, ranks: int, others: set[int]) -> dict[str, Any]:
    """Trains on so many ranks, and from the middle on so many others."""
    whole, again, half = (
        run(ranks, steps, folder / name, tables, scale)
        for steps, name in ((END, "whole"), (END, "again"), (MIDDLE, "half"))
    )
    middle, end = (_state(folder / name / tables, step) for name, step in (("half", MIDDLE), ("whole", END)))
    way = distance(middle, end)
    losses, resumed = [step["loss"] for step in whole["steps"]], {}
    seen = [step["samples"] for step in whole["steps"]]
    for count in sorted(others):
        shutil.copytree(folder / "half", folder / "more")
        more = run(count, END, folder / "more", tables, scale)
        samples = [step["samples"] for step in half["steps"] + more["steps"]]
        resumed[count] = {
            "apart": distance(_state(folder / "more" / tables, END), end) / way,
            "largest_loss_difference": max(
                abs(step["loss"] - loss) for step, loss in zip(more["steps"], losses[MIDDLE:], strict=True)
            ),
            "same_samples_in_each_step": samples == seen,
            "samples_more_than_once": sum(map(len, samples)) - len({sample for step in samples for sample in step}),
            "step_ms": _step_ms(more), "tables": more["tables"],
        }  # fmt: skip
        shutil.rmtree(folder / "more")
    return {
        "commit": provenance()["commit"], "machine": provenance()["machine"], "ranks": ranks,
        "steps": [MIDDLE, END], "samples_per_step": BATCH, "loss_before": mean(losses[:FEW]),
        "loss_after": mean(losses[-FEW:]), "losses": losses, "losses_again": [step["loss"] for step in again["steps"]],
        "apart_without_break": distance(_state(folder / "again" / tables, END), end) / way,
        "step_ms": _step_ms(whole), "tables": whole["tables"], "resumed": resumed,
    }  # fmt: skip


def run(ranks: int, steps: int, folder: Path, tables: str, scale: str) -> Any:
    """What a job tells that trains up to a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "examples.dlrmv4.train", "--json", "--tables", tables, "--scale", scale, "--steps", str(steps)]
    command += ["--global-batch", str(BATCH), "--folder", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def distance(one: State, other: State) -> float:
    """Of all that is in both or one, as rows by key; what one lacks counts as zeros."""
    total = 0.0
    for name in one.keys() | other.keys():
        (keys, rows), (more_keys, more_rows) = (state.get(name, NOTHING) for state in (one, other))
        places, at = np.unique(np.concatenate([keys, more_keys]), return_inverse=True)
        apart = rows.new_zeros(len(places), rows.shape[1])
        apart.index_add_(0, torch.from_numpy(at), torch.cat([rows, -more_rows]))
        total += float(apart.double().square().sum())
    return math.sqrt(total)


def _state(folder: Path, step: int) -> State:
    """Everything of a checkpoint by name."""
    found = folder / f"step-{step:06}"
    state = {name: (torch.arange(len(value)), value) for name, value in _read(found).items()}
    parts: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    for name, value in _read(found / "tables").items() if (found / "tables").exists() else ():
        table, _, array = f"{name}//".split("/")[:3]
        parts[table, array].append(value)
    rows = {name: torch.cat(values) for name, values in parts.items() if name[1] not in ("", "keys")}
    return state | {"/".join(name): (torch.cat(parts[name[0], "keys"])[:, 0], value) for name, value in rows.items()}


def _read(found: Path) -> dict[str, torch.Tensor]:
    known = FileSystemReader(found).read_metadata().state_dict_metadata
    read = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in known.items() if isinstance(one, TensorStorageMetadata)
    }  # fmt: skip
    load(read, checkpoint_id=found)
    return {name: value.reshape(len(value) if value.dim() else 1, -1) for name, value in read.items()}


def _step_ms(result: Any) -> float:
    return 1e3 * float(median(step["seconds"] for step in result["steps"][FEW:]))


def _known(file: Path) -> dict[str, Any]:
    known = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return {name: value for name, value in known.items() if name != "provenance"}


if __name__ == "__main__":
    app()
