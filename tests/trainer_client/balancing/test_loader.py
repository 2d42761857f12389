"""Balancer and loader as a trainer author uses them: a memory cap, addresses, samplers, mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import cost_of
from trainer_client import BalancedLoader, BalanceOptions, Balancer


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_BALANCER", "nonsense")
    with pytest.raises(
        ValueError, match=r"EVENKEEL_BALANCER: address is 'nonsense'; give host:port.*; or 'embedded', or 'off'"
    ):
        Balancer.from_env()
    for value in ("", "embedded", "off", "balancer:50051", "grpc://balancer:50051"):
        monkeypatch.setenv("EVENKEEL_BALANCER", value)
        Balancer.from_env(job="train-42")

    with pytest.raises(ValueError, match="job is ''; give a name"):
        Balancer.connect("balancer:50051", job="")


def submitted_to_a_device_that_is_not_there(_: int) -> int:
    with Balancer.embedded() as balancer:
        loader = BalancedLoader([torch.arange(4)] * 3, balancer, cost=lambda batch: batch)
        list(loader)
        stream = balancer.stream()
        stream.begin(by_hand=True)
        ticket = stream.submit_window([torch.arange(4)], cost=lambda batch: batch, device="cuda:99")
        with pytest.raises(Exception, match=r"CUDA|device"):
            stream.start(ticket, "cuda:99").wait()
        return len(list(loader))


def test_the_loop_after_one_whose_device_was_not_there_goes_on() -> None:
    assert run_ranks(2, submitted_to_a_device_that_is_not_there) == [3, 3]


def test_report_before_the_first_batch_tells_what_to_do() -> None:
    loader = BalancedLoader([], Balancer.embedded(), cost=cost_of)
    with pytest.raises(RuntimeError, match="no batch has been yielded yet"):
        _ = loader.report
    assert sum(loader.counters.rounds.values()) == 0
    assert list(loader) == []


def test_a_cap_that_one_rank_alone_exceeds_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    batches = [{"id": torch.arange(count)} for count in (3, 9, 2)]
    with Balancer.embedded(options=BalanceOptions(memory_caps=[4.0])) as balancer:
        loader = BalancedLoader(
            batches, balancer, cost=lambda batch: batch["id"], memory=lambda batch: torch.ones(len(batch["id"]))
        )
        reasons = [(loader.report.mode.value, loader.report.reason.value, len(batch["id"])) for batch in loader]
    assert reasons == [("identity", "none", 3), ("identity", "partition_failed", 9), ("identity", "none", 2)]
    (record,) = [record for record in caplog.records if "stays unbalanced" in record.message]
    assert "memory adds up to 9, memory_caps to 4" in record.message


class _Loader:
    """A loader with parts that cannot be told the epoch itself."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Epochs(_Loader):
    """A loader or a part of one that can."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_each_part_that_asks_for_the_epoch_learns_it_once() -> None:
    sampler, data = _Epochs(), _Epochs()
    with_parts = _Epochs(sampler=sampler, batch_sampler=_Epochs(sampler=sampler), dataset=data)
    without = _Loader(sampler=sampler, batch_sampler=_Epochs(sampler=sampler), dataset=data)
    for wrapped in (with_parts, without):
        loader = BalancedLoader(wrapped, Balancer.off(), cost=len)
        loader.set_epoch(7)
        assert (loader.dataset, loader.sampler, loader.batch_sampler) == tuple(
            vars(wrapped)[part] for part in ("dataset", "sampler", "batch_sampler")
        )  # where frameworks look for them
    assert with_parts.epochs == [7]  # which tells its parts itself
    assert (sampler.epochs, data.epochs) == ([7], [7])
    plain = BalancedLoader([torch.arange(3)], Balancer.off(), cost=len)
    plain.set_epoch(1)
    with pytest.raises(ValueError, match="epoch is 'a'; give a whole number"):
        plain.set_epoch("a")
    assert not any(hasattr(plain, name) for name in ("dataset", "sampler", "batch_sampler"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"balancer": "balancer:50051"}, r"balancer is 'balancer:50051'; make one with Balancer\.connect"),
        ({"cost": 5}, "cost is 5; give a function"),
        ({"memory": 5}, "memory is 5; give a function"),
        ({"users": "user"}, "users is 'user'; give a function"),
        ({"name": ""}, "name is ''; name the loader by a text"),
        ({"loader": None}, "loader is None; give an iterable of batches"),
        ({"spec": {"items": "n"}}, "spec is {'items': 'n'}; give a BatchSpec"),
        ({"device": "gpu"}, "device is 'gpu'; give 'cpu', 'cuda'"),
        ({"device": "cuda:99"}, "device is 'cuda:99', and this rank sees"),
    ],
)
def test_what_cannot_be_is_refused_at_once(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        BalancedLoader(**{"loader": [], "balancer": Balancer.off(), "cost": len, **given})
