"""TorchEasyRec's own training (`train_and_evaluate`) on CPU ranks, as it is and with Evenkeel behind its data loader.

Generated files, its configuration, its model, planner, pipeline and checkpoints; every sample that is trained is
written down, with its keys. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peers.checkouts import load_torcheasyrec_training, try_out

RANKS, SAMPLES, BATCH = 2, 328, 32
LIMIT_S = 600
WAYS = ("plain", "balanced", "planned")
CONFIG = """
train_input_path: "{folder}/data/*.parquet"
model_dir: "{folder}/model"
train_config {{
  sparse_optimizer {{ adagrad_optimizer {{ lr: 0.01 }} constant_learning_rate {{}} }}
  dense_optimizer {{ adam_optimizer {{ lr: 0.01 }} constant_learning_rate {{}} }}
  num_epochs: 2
  log_step_count_steps: 5
  use_tensorboard: false
}}
eval_config {{}}
data_config {{ batch_size: {batch} dataset_type: ParquetDataset label_fields: "clk" num_workers: 1 }}
feature_configs {{ id_feature {{ feature_name: "user" num_buckets: 100000 embedding_dim: 8 }} }}
feature_configs {{ raw_feature {{ feature_name: "age" }} }}
feature_configs {{
  sequence_feature {{
    sequence_name: "clicks" sequence_length: 400 sequence_delim: "|"
    features {{ id_feature {{ feature_name: "item" num_buckets: 5000 embedding_dim: 8 }} }}
  }}
}}
feature_configs {{ id_feature {{ feature_name: "item" num_buckets: 5000 embedding_dim: 8 }} }}
model_config {{
  feature_groups {{ group_name: "deep" feature_names: "user" feature_names: "age" group_type: DEEP }}
  feature_groups {{ group_name: "seq" feature_names: "item" feature_names: "clicks__item" group_type: SEQUENCE }}
  multi_tower_din {{
    towers {{ input: "deep" mlp {{ hidden_units: [16] }} }}
    din_towers {{ input: "seq" attn_mlp {{ hidden_units: [16] }} }}
    final {{ hidden_units: [16] }}
  }}
  metrics {{ auc {{}} }}
  losses {{ binary_cross_entropy {{}} }}
}}
"""


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """As it is, with balanced batches, and with tables by a plan as well; what each trained."""
    try_out(load_torcheasyrec_training, options.torcheasyrec.absolute())
    rows: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for how in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder))
            described, steps = _train(options, Path(folder), how)
            tables = Path(folder) / "tables.json"
            chosen = {"tables": json.loads(tables.read_text())} if tables.exists() else {}
        rows[how] = _summarize(steps) | chosen
    table = Table(title=f"Training of TorchEasyRec on {RANKS} CPU ranks, 2 epochs; {described['commit']}")
    for name in ("", "samples", "trained", "each as often", "steps", "keys, max / mean", "loss, second epoch"):
        table.add_column(name, justify="right")
    for how, row in rows.items():
        shown = (row["samples"], row["trained"], row["each_as_often"], row["steps"])
        table.add_row(how, *map(str, shown), f"{row['keys_max_over_mean']:.3f}", f"{row['loss']:.3f}")
    console.print(table)
    assert all(row["trained"] == 2 * RANKS * SAMPLES and row["each_as_often"] for row in rows.values()), rows
    return {"peer": described, "ranks": RANKS, **rows}


def _write(folder: Path) -> None:
    """A file for each rank: histories of log-normal length, and a label that depends on them."""
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "data").mkdir()
    for rank in range(RANKS):
        draw = np.random.default_rng(rank)
        lengths = np.clip(draw.lognormal(3.2, 1.0, SAMPLES).astype(int), 1, 400)
        clicks = [draw.integers(0, 5_000, length).tolist() for length in lengths]
        columns = {
            "user": np.arange(rank * SAMPLES, (rank + 1) * SAMPLES),
            "age": draw.random(SAMPLES, dtype=np.float32),
            "item": draw.integers(0, 5_000, SAMPLES),
            "clicks__item": pa.array(clicks, type=pa.list_(pa.int64())),
            "clk": (np.arange(SAMPLES) % 2).astype(np.int64),
        }
        parquet.write_table(pa.table(columns), folder / "data" / f"part-{rank}.parquet")
    (folder / "job.config").write_text(CONFIG.format(folder=folder, batch=BATCH))


def _train(options: argparse.Namespace, folder: Path, how: str) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Starts the ranks as its users do; whose code ran, and the steps of each rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
        "--master-addr", "127.0.0.1", "--master-port", str(options.master_port),
        "-m", "benchmarks.peers.training_rank", str(options.torcheasyrec.absolute()), str(folder), how,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_MANUAL_SEED": "0"}
    subprocess.run(command, check=True, env=environment, timeout=LIMIT_S)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return ranks[0]["peer"], [rank["steps"] for rank in ranks]


def _summarize(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    users = [user for steps in ranks for step in steps for user in step["users"]]
    counts = np.bincount(users, minlength=RANKS * SAMPLES)
    keys = np.array([[step["keys"] for step in steps] for steps in ranks])
    return {
        "samples": RANKS * SAMPLES,
        "trained": len(users),
        "each_as_often": bool((counts == counts[0]).all()),
        "steps": len(ranks[0]),
        "keys_max_over_mean": float((keys.max(axis=0) / keys.mean(axis=0)).mean()),
        "loss": float(np.mean([step["loss"] for steps in ranks for step in steps[len(steps) // 2 :]])),
        "samples_of_ranks": [[len(step["users"]) for step in steps] for steps in ranks],
    }
