"""What holds of the comparisons with peers' own code, without their code."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers.__main__ import main
from benchmarks.peers.batches import PAYLOADS, SPEC, BatchMaker, batch_class, to_sequences
from benchmarks.peers.cases import CASES, Case, add_shuffle_flags, check_shuffle_flags
from benchmarks.peers.checkouts import CheckoutError, commit_of, load_recsys_examples, load_torcheasyrec, load_torchrec
from benchmarks.peers.planners import _their_cost
from benchmarks.peers.shuffling import summarize
from benchmarks.placement import knapsack
from evenkeel.placement.knapsack import solve_knapsack
from examples.datasets import SyntheticSequences, lengths_named
from trainer_client.balancing.batches import BatchError, flatten


@dataclass
class BaseBatch:
    features: Any
    batch_size: int
    feature_to_max_seqlen: dict[str, int]
    contextual_feature_names: list[str] = field(default_factory=list)
    labels: Any = None
    actual_batch_size: int | None = None


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("pad_to", [5, 8])
def test_a_padded_batch_holds_the_sequences(payload: Any, pad_to: int) -> None:
    data = SyntheticSequences(num_batches=1, batch_size=8, lengths=lengths_named("uniform", maximum=30))
    sequences = data.batch(0)
    workload = torch.arange(1, 9)
    maker = BatchMaker(kind=batch_class(BaseBatch), payload=payload, words=torch.arange(200_000))
    batch = maker.make(sequences, workload, keep=5, pad_to=pad_to)
    got = to_sequences(batch)
    for name in ("sample", "context", "num_history", "num_candidates"):
        assert torch.equal(getattr(got, name), getattr(sequences, name)[:5]), name
    history, candidates = int(sequences.num_history[:5].sum()), int(sequences.num_candidates[:5].sum())
    assert torch.equal(got.history, sequences.history[:history])
    assert torch.equal(got.labels, sequences.labels[:candidates])
    assert batch.workload.tolist() == [1, 2, 3, 4, 5, 0, 0, 0][:pad_to]
    if pad_to != 5:  # not balanced by Evenkeel, which would lose the number of real samples
        with pytest.raises(BatchError, match="batch_size names 'actual_batch_size', which is 5, but the batch holds 8"):
            flatten(batch, SPEC)
        batch.actual_batch_size = pad_to
    assert flatten(batch, SPEC).num_samples == pad_to
    tokens = {"ids": 0, "features20": 20 * history, "embeddings": 512 * history}[payload]
    assert (0 if batch.extra is None else batch.extra.values().numel()) == tokens


def test_cases_have_names_that_are_read_back() -> None:
    assert [str(Case.parse(name)) for name in CASES] == list(CASES)
    with pytest.raises(ValueError, match="the case is 'zipf/ids/whole'; use"):
        Case.parse("zipf/ids/whole")


def test_what_is_no_checkout_is_told(tmp_path: Path) -> None:
    for load in (load_recsys_examples, load_torcheasyrec, load_torchrec):
        with pytest.raises(CheckoutError, match=f"{tmp_path} has no "):
            load(tmp_path)
    (tmp_path / "tzrec/utils").mkdir(parents=True)
    (tmp_path / "tzrec/utils/plan_util.py").touch()
    with pytest.raises(CheckoutError, match=r"run its scripts/gen_proto\.sh"):
        load_torcheasyrec(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "shuffle", "--recsys-examples", "{none}"], "shuffle: {none} has no examples/commons"),
        (["--parts", "decisions", "--recsys-examples", "{none}"], "decisions: {none} has no examples/commons"),
        (["--parts", "dumps", "--recsys-examples", "{none}"], "dumps: {none} has no corelib/dynamicemb"),
        (["--parts", "input_dist", "--torchrec", "{none}"], "input_dist: {none} has no torchrec/distributed/maglev"),
        (["--parts", "training", "--torcheasyrec", "{none}"], "training: {none} has no tzrec/protos/feature_pb2.py"),
        (["--parts", "planners"], "the part planners needs --torcheasyrec"),
        ([], "nothing to compare with: give --recsys-examples"),
        (
            ["--recsys-examples", "{none}", "--max-length", "64", "--equal", "65"],
            "--equal is 65; use 1 to 64, as --max-length says",
        ),
        (["--recsys-examples", "{none}", "--cases", "zpf"], "the case is 'zpf'; use LENGTHS"),
    ],
)
def test_what_cannot_run_is_one_sentence(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    none = str(tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["peers", *(flag.format(none=none) for flag in flags)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("peers: " + message.format(none=none))


def test_equal_lengths_are_those_that_the_model_takes() -> None:
    parser = argparse.ArgumentParser()
    add_shuffle_flags(parser)
    for flags, expected in (([], 1000), (["--max-length", "64"], 64), (["--equal", "7"], 7)):
        options = parser.parse_args(flags)
        check_shuffle_flags(options)
        assert options.equal == expected


def test_commits_are_those_of_the_checkout_itself(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit_of(tmp_path) == head[:12]
    inside = tmp_path / "copied"
    inside.mkdir()
    assert commit_of(inside) == "unknown"  # what is around it is another project
    (inside / "COMMIT").write_text("0123456789abcdef\n")
    assert commit_of(inside) == "0123456789ab"


def test_figures_are_those_of_the_slowest_rank() -> None:
    def raw(scale: float) -> dict[str, Any]:
        return {
            "steps_ms": [[[90.0, 10 * scale, 10 * scale]], [[90.0, 20 * scale, 10 * scale]]],
            "host_ms": [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]],
            "loads": [[[1.0, 1.0, 3.0]], [[1.0, 1.0, 1.0]]],
            "losses": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0 + scale - 1]],
            "peak_bytes": [5, 7],
        }

    recorded = {
        "peer": {}, "machine": "GPU", "versions": {"cuda": "13"}, "ranks": 2, "options": {"device": None},
        "cases": [{"case": "zipf", "seconds": 1.0, "settings": {"off": raw(1.0), "evenkeel": raw(2.0)}}],
    }  # fmt: skip
    rows = summarize(recorded, skip=1)["cases"][0]["settings"]
    assert rows["off"]["mean_ms"] == 15
    assert rows["off"]["over_evenkeel"] == 0.5
    assert rows["off"]["host_ms"] == 2
    assert rows["off"]["peak_bytes"] == 7
    assert rows["off"]["max_over_mean"] == pytest.approx((1 + 1 + 1.5) / 3)
    assert rows["evenkeel"]["loss_deviation"] == pytest.approx(1 / 6)
    recorded["options"] = {"device": "cpu"}
    assert "mean_ms" not in summarize(recorded, skip=0)["cases"][0]["settings"]["off"]  # no times of stand-ins


def test_the_best_plan_that_is_proposed_and_fits_counts() -> None:
    class Everything:
        """Proposes every plan; reads what the peer's proposer reads."""

        def load(self, search_space: list[Any]) -> None:
            tables: dict[str, list[Any]] = {}
            for option in search_space:
                assert option.total_storage.hbm == pytest.approx(sum(shard.storage.hbm for shard in option.shards))
                tables.setdefault(option.fqn, []).append(option)
            self._left = itertools.product(*tables.values())

        def propose(self) -> Any:
            return next(self._left, None)

        def feedback(self, *, partitionable: bool, plan: Any, perf_rating: float, storage_constraint: Any) -> None:
            assert len(storage_constraint.devices) == storage_constraint.local_world_size == 2
            assert partitionable in (True, False)
            assert perf_rating == pytest.approx(sum(option.total_perf for option in plan))

    peer: Any = SimpleNamespace(planner=SimpleNamespace(DynamicProgrammingProposer=Everything))
    for seed in range(3):
        problem = knapsack(4, 6, seed)
        best = solve_knapsack(problem)
        cost = _their_cost(peer, problem, 2)
        assert (cost is None) == (best.choice is None)
        if cost is not None:
            assert cost == pytest.approx(best.cost)
            assert np.isfinite(cost)
