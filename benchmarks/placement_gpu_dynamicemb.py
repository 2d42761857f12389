"""Steps of DynamicEmb itself, from a checkout that was built elsewhere, held against the planner's model.

python -m benchmarks.placement_gpu_dynamicemb --library FOLDER --json dynamicemb.json
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.placement_gpu_model import EXPONENT, keys_of
from evenkeel.placement import Mode, Optimizer, PlanRequest, Runtime, Step, Table, Topology
from evenkeel.placement.access import power_law
from evenkeel.placement.fitted_costs import Measurement, predict_seconds
from evenkeel.placement.hardware import builtin_profile
from evenkeel.placement.options import rank_load

_STATE = {Optimizer.SGD: 0, Optimizer.ADAM: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A module of equal tables.

    Attributes:
        mode: Mode of the tables.
        ratio: Fraction of the rows in HBM.
        tables: Number of tables.
        rows: Rows of each.
        dim: Width of an embedding.
        ids: Lookups of a table and step.
        optimizer: Optimizer of the tables.
    """

    mode: Mode
    ratio: float
    tables: int = 2
    rows: int = 4 << 20
    dim: int = 128
    ids: int = 131_072
    optimizer: Optimizer = Optimizer.ADAM


_HBM, _CACHED, _HOST = Mode.HBM_ONLY, Mode.CACHING, Mode.HOST_ONLY

CONFIGURATIONS = (
    Configuration(mode=_HBM, ratio=1.0),
    Configuration(mode=_CACHED, ratio=0.5),
    Configuration(mode=_HOST, ratio=0.0),
    Configuration(mode=_CACHED, ratio=0.1),
    Configuration(mode=_CACHED, ratio=0.9),
    Configuration(mode=_HOST, ratio=0.0, ids=8_192),
    Configuration(mode=_CACHED, ratio=0.9, ids=8_192),
    Configuration(mode=_HBM, ratio=1.0, ids=8_192),
    Configuration(mode=_HOST, ratio=0.0, ids=32_768, dim=64),
    Configuration(mode=_CACHED, ratio=0.3, ids=32_768, dim=64),
    Configuration(mode=_HBM, ratio=1.0, tables=8, rows=1 << 20, ids=65_536, dim=64),
    Configuration(mode=_CACHED, ratio=0.3, tables=8, rows=1 << 20, ids=65_536, dim=64),
    Configuration(mode=_HOST, ratio=0.0, tables=8, rows=1 << 20, ids=16_384, dim=64),
    Configuration(mode=_CACHED, ratio=0.5, optimizer=Optimizer.SGD),
    Configuration(mode=_HOST, ratio=0.0, optimizer=Optimizer.SGD),
    Configuration(mode=_HBM, ratio=1.0, ids=524_288),
    Configuration(mode=_CACHED, ratio=0.25, ids=262_144),
    Configuration(mode=_HOST, ratio=0.0, tables=1, ids=2_048),
    Configuration(mode=_CACHED, ratio=0.25, tables=1, rows=8 << 20),
    Configuration(mode=_HOST, ratio=0.0, ids=262_144),
    Configuration(mode=_CACHED, ratio=0.05, ids=65_536),
    Configuration(mode=_CACHED, ratio=0.7, tables=8, rows=1 << 20, ids=8_192, dim=64),
    Configuration(mode=_HBM, ratio=1.0, tables=16, rows=1 << 18, ids=8_192, dim=64),
    Configuration(mode=_HOST, ratio=0.0, tables=16, rows=1 << 18, ids=4_096, dim=64),
)


def build(library: Any, tables_module: Any, configuration: Configuration, device: torch.device) -> Any:
    """DynamicEmb's module for the configuration, with all keys inserted."""
    c = configuration
    value_bytes = c.dim * (1 + _STATE[c.optimizer]) * 4
    hbm = {_HBM: sys.maxsize, _HOST: 0}.get(c.mode, int(c.rows * c.ratio * value_bytes))
    options = [
        library.DynamicEmbTableOptions(
            index_type=torch.int64,
            embedding_dtype=torch.float32,
            dim=c.dim,
            max_capacity=c.rows,
            local_hbm_for_values=hbm,
            bucket_capacity=128,
            initializer_args=library.DynamicEmbInitializerArgs(mode=library.DynamicEmbInitializerMode.NORMAL),
            score_strategy=library.DynamicEmbScoreStrategy.TIMESTAMP,
            caching=c.mode is _CACHED,
        )
        for _ in range(c.tables)
    ]
    kind = {Optimizer.SGD: library.EmbOptimType.EXACT_SGD, Optimizer.ADAM: library.EmbOptimType.ADAM}[c.optimizer]
    module = tables_module.BatchedDynamicEmbeddingTablesV2(
        table_options=options,
        table_names=[f"t{index}" for index in range(c.tables)],
        pooling_mode=library.DynamicEmbPoolingMode.NONE,
        output_dtype=torch.float32,
        device=device,
        optimizer=kind,
        learning_rate=0.01,
    )
    module.train()
    each = 1 << 17
    for first in range(0, c.rows, each):
        keys = torch.arange(first, min(first + each, c.rows), device=device)
        step(module, keys.repeat(c.tables))
    return module


def step(module: Any, keys: torch.Tensor) -> None:
    """Forward and backward."""
    offsets = torch.arange(len(keys) + 1, device=keys.device)
    found = module(keys, offsets)
    found.backward(torch.ones_like(found))


def measure(
    library: Any, tables_module: Any, configuration: Configuration, device: torch.device, warmup: int, repeats: int
) -> dict[str, Any]:
    """Steps back to back and by themselves."""
    c = configuration
    before = torch.cuda.mem_get_info()[0]
    module = build(library, tables_module, c, device)
    generator = torch.Generator(device).manual_seed(5)

    def batch() -> torch.Tensor:
        return torch.cat([keys_of(c.rows, c.ids, generator) for _ in range(c.tables)])

    for _ in range(warmup if c.mode is _CACHED else 10):
        step(module, batch())
    single = []
    for keys in [batch() for _ in range(repeats)]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(module, keys)
        torch.cuda.synchronize()
        single.append(time.perf_counter() - start)
    kept = [batch() for _ in range(repeats)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for keys in kept:
        step(module, keys)
    torch.cuda.synchronize()
    in_a_row = (time.perf_counter() - start) / repeats
    used = before - torch.cuda.mem_get_info()[0]
    return {
        "configuration": asdict(c),
        "predicted_ms": predicted(c) * 1e3,
        "measured_ms": statistics.median(single) * 1e3,
        "in_a_row_ms": in_a_row * 1e3,
        "hbm_bytes": used,
    }


def sample_of(configuration: Configuration, seconds: float) -> Measurement:
    """A measured step in the form that the fit takes."""
    c = configuration
    table = Table(name="table", rows=c.rows, dim=c.dim, optimizer=c.optimizer, access=power_law(EXPONENT, c.rows))
    request = PlanRequest(
        tables=(table,),
        topology=Topology(ranks=1, hbm_bytes=1 << 40),
        hardware="h200",
        step=Step(samples_per_rank=c.ids),
    )
    return Measurement(
        mode=c.mode,
        ratio=c.ratio,
        seconds=seconds,
        loads=(rank_load(request, table),) * c.tables,
        cache_rows=(c.rows * c.ratio,) * c.tables,
    )


def predicted(configuration: Configuration) -> float:
    """What the model says, in seconds."""
    profile = builtin_profile("h200")
    return predict_seconds(profile, profile.costs(Runtime.DYNAMICEMB), sample_of(configuration, 1.0))


def main(
    library: Annotated[Path, typer.Option(help="Folder with the built dynamicemb package and its extension.")],
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")],
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones, of caches.")] = 100,
    repeats: Annotated[int, typer.Option(help="Timed steps.")] = 15,
    seconds: Annotated[float, typer.Option(help="Begin no configuration after this time.")] = 200.0,
) -> None:
    """Measure configurations one after the other."""
    begin = time.perf_counter()
    sys.path.insert(0, str(library))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    theirs, module = (importlib.import_module(n) for n in ("dynamicemb", "dynamicemb.batched_dynamicemb_tables"))
    rows: list[dict[str, Any]] = []
    for configuration in CONFIGURATIONS:
        if time.perf_counter() - begin > seconds:
            break
        try:
            rows.append(measure(theirs, module, configuration, device, warmup, repeats))
            last = rows[-1]
            print(
                f"{time.perf_counter() - begin:6.1f} s  {configuration}  predicted {last['predicted_ms']:.2f}  "
                f"measured {last['measured_ms']:.2f}  in a row {last['in_a_row_ms']:.2f}",
                flush=True,
            )
        except Exception:  # the others are worth having
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        about = {"command": "python -m benchmarks.placement_gpu_dynamicemb --library FOLDER --json FILE"}
        json_path.write_text(
            json.dumps(about | {"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
