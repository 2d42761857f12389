"""Evenkeel behind TorchEasyRec's data loaders, with a stand-in of its `Batch` and its loader."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from benchmarks.harness.ranks import run_ranks
from trainer_client.balancing import BalanceOptions, Balancer
from trainer_client.balancing.adapters.torcheasyrec import balance_dataloader, balance_training, count_keys, take_apart
from trainer_client.balancing.batches import BatchError

SIZE = 8
Mode = Enum("Mode", "TRAIN EVAL PREDICT")


@dataclass
class StandInBatch:
    """With the fields of TorchEasyRec's `Batch`."""

    dense_features: dict[str, KeyedTensor] = field(default_factory=dict)
    sparse_features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    sequence_mulval_lengths: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    sequence_dense_features: dict[str, JaggedTensor] = field(default_factory=dict)
    labels: dict[str, torch.Tensor] = field(default_factory=dict)
    jagged_labels: dict[str, JaggedTensor] = field(default_factory=dict)
    reserves: Any = None
    tile_size: int = -1
    sample_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    additional_infos: dict[str, torch.Tensor] = field(default_factory=dict)
    dummy: bool = False
    checkpoint_info: dict[str, int] | None = None
    data_timestamp: float = -1.0


def make_batch(rank: int, step: int, size: int = SIZE) -> StandInBatch:
    draw = np.random.default_rng([rank, step])
    ids = 1_000 * rank + 100 * step + torch.arange(size)
    lengths = torch.from_numpy(draw.integers(1, 60, size))
    keys = torch.repeat_interleave(ids, lengths)
    sparse = KeyedJaggedTensor(
        ["user", "clicks"],
        torch.cat([ids, keys]),
        weights=torch.cat([ids, keys]).float(),
        lengths=torch.cat([torch.ones(size, dtype=torch.int64), lengths]),
    )
    return StandInBatch(
        dense_features={"__BASE__": KeyedTensor(["age", "vector"], [1, 3], ids[:, None].repeat(1, 4).float())},
        sparse_features={"__BASE__": sparse},
        sequence_mulval_lengths={"__BASE__": KeyedJaggedTensor(["clicks"], keys, lengths=lengths)},
        sequence_dense_features={"price": JaggedTensor(keys[:, None].repeat(1, 2).float(), lengths=lengths)},
        labels={"clk": ids},
        jagged_labels={"each": JaggedTensor(keys, lengths=lengths)},
        sample_weights={"weight": ids.float()},
        checkpoint_info={f"part{rank}": 100 * step + size - 1},
        data_timestamp=10.0 * step + rank,
    )


def check_whole(batch: StandInBatch) -> list[int]:
    """The samples, after looking whether all of each is there."""
    ids = batch.labels["clk"]
    sparse, price = batch.sparse_features["__BASE__"], batch.sequence_dense_features["price"]
    lengths = sparse["clicks"].lengths()
    keys = torch.repeat_interleave(ids, lengths)
    for values in (sparse["user"].values(), sparse["user"].weights(), batch.sample_weights["weight"]):
        assert torch.equal(values.long(), ids)
    for jagged in (
        sparse["clicks"],
        batch.sequence_mulval_lengths["__BASE__"]["clicks"],
        batch.jagged_labels["each"],
    ):
        assert torch.equal(jagged.values(), keys)
        assert torch.equal(jagged.lengths(), lengths)
    assert torch.equal(price.values().long(), keys[:, None].repeat(1, 2))
    dense = batch.dense_features["__BASE__"]
    assert dense.keys() == ["age", "vector"]
    assert torch.equal(dense["vector"].long(), ids[:, None].repeat(1, 3))
    return [int(one) for one in ids]


class StandInDataLoader:
    """What is used of a loader of `create_dataloader`: its method `get_iterator`."""

    def __init__(self, batches: list[StandInBatch]) -> None:
        self.batches = batches

    def get_iterator(self) -> Iterator[StandInBatch]:
        return iter(self.batches)


def stand_in_main() -> ModuleType:
    """A `tzrec.main` with a `create_dataloader` of the same arguments."""
    main = ModuleType("tzrec.main")

    def create_dataloader(
        data_config: Any,
        features: Any,
        input_path: Any,
        reserved_columns: Any = None,
        mode: Mode = Mode.TRAIN,
        checkpoint_state: Any = None,
    ) -> StandInDataLoader:
        vars(main)["calls"] += 1
        del data_config, features, reserved_columns, mode, checkpoint_state
        return StandInDataLoader(input_path)

    vars(main).update(create_dataloader=create_dataloader, calls=0)
    return main


def train(rank: int, steps: list[int], passes: int) -> list[list[dict[str, Any]]]:
    """Passes over as many batches as `steps` says for this rank, as the loop of `tzrec.main` makes them."""
    sys.modules["tzrec"], sys.modules["tzrec.main"] = ModuleType("tzrec"), stand_in_main()
    balance_training()
    balance_training()  # once more changes nothing
    main: Any = sys.modules["tzrec.main"]
    own = [make_batch(rank, step) for step in range(steps[rank])]
    config = SimpleNamespace(HasField=lambda _: False)
    plain = main.create_dataloader(config, [], own, mode=Mode.EVAL)
    assert list(plain.get_iterator()) == own
    dataloader = main.create_dataloader(config, [], own)
    found = []
    for _ in range(passes):
        found.append(
            [
                {
                    "samples": check_whole(batch),
                    "load": int(count_keys(take_apart(batch)).sum()),
                    "rows": batch.checkpoint_info,
                    "time": batch.data_timestamp,
                }
                for batch in dataloader.get_iterator()
            ]
        )
    return found


def test_batches_of_a_job_are_spread_whole_and_tell_of_their_own_rows() -> None:
    steps = [3, 5]
    found = run_ranks(2, train, steps, 2)
    for one in zip(*found, strict=True):  # each pass
        assert [len(rank) for rank in one] == [5, 5]  # rank 0's data ends early, and its loop does not
        trained = sorted(sample for rank in one for step in rank for sample in step["samples"])
        assert trained == sorted(
            int(sample)
            for rank in (0, 1)
            for step in range(steps[rank])
            for sample in make_batch(rank, step).labels["clk"]
        )
        for step in range(5):
            loads = [rank[step]["load"] for rank in one]
            assert max(loads) / np.mean(loads) < 1.1
            homes = [make_batch(rank, step) for rank in (0, 1)]
            for rank, home in enumerate(homes):
                ended = step >= steps[rank]
                assert one[rank][step]["rows"] == (None if ended else home.checkpoint_info)
                assert one[rank][step]["time"] == (-1.0 if ended else home.data_timestamp)
        for step in range(3):
            assert [len(rank[step]["samples"]) for rank in one] == [SIZE, SIZE]


def test_what_cannot_be_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(0, 0)
    negatives = KeyedJaggedTensor(["item"], torch.arange(20), lengths=torch.ones(20, dtype=torch.int64))
    with_negatives = replace(batch, sparse_features=batch.sparse_features | {"__NEG__": negatives})
    with pytest.raises(BatchError, match="'__NEG__'] has 20 rows in a batch of 8 samples"):
        take_apart(with_negatives)
    with pytest.raises(BatchError, match="no features and no labels"):
        take_apart(StandInBatch())
    monkeypatch.setitem(sys.modules, "tzrec", ModuleType("tzrec"))
    monkeypatch.setitem(sys.modules, "tzrec.main", stand_in_main())
    balance_training()
    sampled = SimpleNamespace(HasField=lambda name: name == "sampler")
    with pytest.raises(ValueError, match="data_config has a sampler"):
        sys.modules["tzrec.main"].create_dataloader(sampled, [], [])
    assert not vars(sys.modules["tzrec.main"])["calls"]  # which would start servers of samples


def test_options_are_refused_that_do_not_go_with_its_checkpoints() -> None:
    with pytest.raises(ValueError, match="window is 4: the checkpoints of TorchEasyRec"):
        balance_dataloader(StandInDataLoader([]), options=BalanceOptions(window=4))
    with Balancer.off() as balancer, pytest.raises(ValueError, match="options are given beside a balancer"):
        balance_dataloader(StandInDataLoader([]), balancer=balancer, options=BalanceOptions())


def test_the_default_cost_counts_keys() -> None:
    batch = make_batch(0, 0)
    lengths = batch.jagged_labels["each"].lengths()
    assert count_keys(take_apart(batch)).tolist() == (1 + 16 + 2 * lengths).tolist()
    assert count_keys(take_apart(StandInBatch(labels=batch.labels))).tolist() == [16] * SIZE
    assert not dist.is_initialized()
