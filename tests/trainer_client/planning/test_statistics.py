from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typer.testing import CliRunner

from benchmarks.harness import zygote
from evenkeel.key_statistics import merge
from evenkeel.placement import InvalidInputError, MissCurve, PlanRequest, Runtime, Table, Topology
from evenkeel.placement.request import Step
from trainer_client.cli import app
from trainer_client.planning import KeyStatistics, describe_model, with_statistics
from trainer_client.planning import statistics as observing


def _model() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=5_000, feature_names=["clicked", "bought"]),
        EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=900, feature_names=["user"]),
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def _batch(seed: int, samples: int = 64, kind: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 6, 4 * samples)
    lengths[3 * samples :] = 1
    values = (draw.random(lengths.sum()) ** 4 * 900).astype(np.int64)
    keys = ["clicked", "unknown", "bought", "user"]
    return KeyedJaggedTensor(keys=keys, values=torch.tensor(values, dtype=kind), lengths=torch.tensor(lengths))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_keys_of_all_features_of_a_table_are_followed(kind: torch.dtype) -> None:
    statistics = KeyStatistics(_model())
    for seed in range(20):
        statistics.observe(_batch(seed, kind=kind))
    traces = statistics.gather()
    for name, features in (("item", ("clicked", "bought")), ("user", ("user",))):
        own = [torch.cat([_batch(seed)[feature].values() for feature in features]).numpy() for seed in range(20)]
        trace = traces[name]
        assert (trace.steps, trace.samples, trace.lookups) == (20, 20 * 64, sum(len(keys) for keys in own))
        assert np.bincount(trace.step).tolist() == [len(np.unique(keys)) for keys in own]
        assert trace.times.sum() == trace.lookups
        assert len(np.unique(trace.key)) == len(np.unique(np.concatenate(own)))


def test_two_batches_of_a_step_are_one_step() -> None:
    statistics = KeyStatistics({"item": ["clicked"]})
    for seed in range(9):
        statistics.observe(_batch(seed), _batch(seed + 100))
    assert statistics.traces()["item"].steps == 9


def test_curves_and_lookups_go_into_the_request() -> None:
    statistics = KeyStatistics(_model())
    for seed in range(64):
        statistics.observe(_batch(seed))
    tables = describe_model(_model())
    request = PlanRequest(tables=tables, topology=Topology(ranks=4, hbm_bytes=1 << 34), step=Step(samples_per_rank=32))
    planned, curves = with_statistics(request, statistics.gather())
    item = planned.tables[0]
    assert isinstance(item.access, MissCurve)
    assert item.ids_per_sample == pytest.approx(statistics.traces()["item"].lookups / (64 * 64))
    assert curves["item"].lookups_per_step == pytest.approx(2 * statistics.traces()["item"].lookups / 64, rel=0.01)
    assert KeyStatistics({"user": ["user"]}).traces() == {}
    unheard = {"item": statistics.gather()["item"]}
    assert with_statistics(request, unheard)[0].tables[1] == tables[1]  # nothing was observed
    idle = KeyStatistics({"user": ["user"]})
    none = torch.zeros(64, dtype=torch.int64)
    for _ in range(3):
        idle.observe(KeyedJaggedTensor(["user"], none[:0], lengths=none))
    assert with_statistics(request, idle.gather())[0].tables[1].ids_per_sample == 0  # and here no key was
    seldom = {"user": replace(statistics.gather()["user"].thinned(0), lookups=128.0)}  # and here none is in the sample
    assert with_statistics(request, seldom)[0].tables[1] == replace(tables[1], ids_per_sample=128 / (64 * 64))
    larger = PlanRequest(tables=tables, topology=Topology(ranks=4, hbm_bytes=1 << 34), step=Step())
    with pytest.raises(InvalidInputError, match="too few for steps of 4096 samples"):
        with_statistics(larger, statistics.gather())


def test_the_command_plans_with_the_files_of_all_ranks(tmp_path: Path) -> None:
    parts = [KeyStatistics({"item": ["clicked", "bought"]}) for _ in range(2)]
    for seed in range(40):
        for rank, part in enumerate(parts):
            part.observe(_batch(2 * seed + rank))
    files = []
    for rank, part in enumerate(parts):
        files.append(tmp_path / f"keys-{rank}.npz")
        part.save(files[-1])
    tables = tmp_path / "tables.yaml"
    tables.write_text("- {name: item, rows: 5000, dim: 8}\n- {name: other, rows: 100, dim: 8}\n")
    options = ["--topology", "h200x2", "--samples", "64"]
    options += [part for file in files for part in ("--statistics", str(file))]
    result = CliRunner().invoke(app, ["plan", str(tables), *options])
    assert result.exit_code == 0, result.output
    keys = len(np.unique(merge(part.traces() for part in parts)["item"].key))
    assert f"from {keys} sampled keys" in result.output
    assert "with what the host launches" not in result.output
    other = CliRunner().invoke(app, ["plan", str(tables), "--runtime", "torchrec", *options[:4]])
    assert "with what the host launches: about 3." in other.output
    tables_alone = CliRunner().invoke(app, ["plan", str(tables), "--statistics", str(tables), *options[:4]])
    assert tables_alone.exit_code == 2
    assert f"--statistics {tables}: are no key statistics (File is not a zip file)" in tables_alone.stderr
    lost = CliRunner().invoke(app, ["plan", str(tables), "--statistics", "lost.npz", *options[:4]])
    assert lost.exit_code == 2
    assert "'--statistics': file 'lost.npz' does not exist" in lost.stderr
    assert "tables without statistics, planned with the access that they are given: other" in result.stderr
    twice = CliRunner().invoke(app, ["plan", str(tables), *options, "--statistics", str(files[0])])
    assert twice.exit_code == 2
    assert f"--statistics: holds the same as {files[0]}" in twice.stderr
    tables.write_text("- {name: things, rows: 5000, dim: 8}\n")
    strange = CliRunner().invoke(app, ["plan", str(tables), *options])
    assert strange.exit_code == 2
    assert "are tables of which no statistics tell" in strange.stderr
    assert "name tables as the statistics do: item" in strange.stderr


def test_more_keys_than_a_table_of_torchrec_has_rows_are_refused() -> None:
    statistics = KeyStatistics(_model())
    for seed in range(64):
        statistics.observe(_batch(seed))
    traces = statistics.gather()
    keys = len(np.unique(traces["item"].key))
    topology, step = Topology(ranks=1, hbm_bytes=1 << 34), Step(samples_per_rank=32)
    fits = PlanRequest(
        tables=(Table(name="item", rows=keys, dim=8),), topology=topology, step=step, runtime=Runtime.TORCHREC
    )
    assert with_statistics(fits, traces)[1]
    short = replace(fits, tables=(replace(fits.tables[0], rows=keys - 1),))
    with pytest.raises(InvalidInputError, match=f"saw about {keys} keys, and the table has {keys - 1} rows") as caught:
        with_statistics(short, traces)
    assert caught.value.field == "statistics"
    assert with_statistics(replace(short, runtime=Runtime.DYNAMICEMB), traces)[1], "it gives up keys"


def test_a_batch_that_cannot_be_read_is_told() -> None:
    statistics = KeyStatistics({"item": ["clicked"]})
    batch = _batch(0)
    short = KeyedJaggedTensor(keys=batch.keys(), values=batch.values(), lengths=batch.lengths()[:-1])
    statistics.observe(short)
    with pytest.raises(RuntimeError, match="could not be read"):
        statistics.traces()


class _Stuck(list[str]):
    reached = threading.Event()

    def __iter__(self) -> Iterator[str]:
        self.reached.set()
        threading.Event().wait()
        return super().__iter__()


def _read_stuck() -> None:
    batch, seen = _batch(0), KeyStatistics({"item": ["clicked"]})
    batch.keys = lambda: _Stuck(["clicked"])
    seen.observe(batch)
    assert _Stuck.reached.wait(60)
    observing._PATIENCE = 0.1
    with pytest.raises(RuntimeError, match=r"^key statistics: no batch was read for 0.1 s$"):
        seen.traces()


def test_a_reader_that_is_stuck_does_not_keep_the_job_from_ending() -> None:
    job = zygote.process(_read_stuck)
    job.join(120)
    assert job.exitcode == 0


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="before it is sharded"):
        KeyStatistics(torch.nn.Linear(2, 2))
