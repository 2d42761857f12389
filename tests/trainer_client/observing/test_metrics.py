"""The exporter of a rank, scraped while real ranks train."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.ranks import run_ranks
from tests.asking import get
from tests.trainer_client.balancing.jobs import SPEC, Job, cost_of
from trainer_client import BalancedLoader, BalanceOptions
from trainer_client.observing.metrics import RankExporter

STEPS = (6, 5)


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = get(f"http://127.0.0.1:{port}/metrics")[1]
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    found = [
        number
        for (key, pairs), number in samples.items()
        if key == f"evenkeel_trainer_{name}" and labels.items() <= dict(pairs).items()
    ]
    assert found, f"{name} {labels} is not exported"
    return sum(found)


def train(rank: int, folder: str) -> dict[str, Any]:
    job = Job(steps=STEPS, name="exported", options=BalanceOptions(min_samples=7, window=2))
    with job.balancer() as balancer, RankExporter.start(job="exported", rank=rank, targets=folder) as exporter:
        loader = BalancedLoader(list(job.batches(rank)), balancer, cost=cost_of, spec=SPEC, drop_last=True)
        reports, scraped, searched = [], {}, {}
        for epoch in range(2):
            for _batch in exporter.watch(loader):
                reports.append((loader.report.own_load, loader.report.imbalance_before, loader.report.own_samples))
                scraped = scrape(exporter.port)
                searched[epoch, loader.report.round] = loader.report.partition_seconds
        target = json.loads((Path(folder) / f"exported-{rank}.json").read_text())
        assert target == [{"targets": [f"127.0.0.1:{exporter.port}"]}]
        return {
            "reports": reports,
            "during": scraped,
            "after": scrape(exporter.port),
            "totals": loader.counters,
            "searched": sum(searched.values()),
        }


def test_ranks_export_what_their_reports_say(tmp_path: Path) -> None:
    results = run_ranks(2, train, str(tmp_path))
    for rank, result in enumerate(results):
        reports, during, after, totals, searched = result.values()
        assert value(during, "load", rank=str(rank), when="after") == reports[-1][0]
        assert value(after, "rounds_total", mode="embedded") == len(reports)
        assert value(after, "samples_total") == sum(samples for _, _, samples in reports)
        assert value(after, "step_seconds_count") == len(reports)
        before = [value for _, value, _ in reports]
        assert value(after, "imbalance_excess_ratio_sum", when="before") == pytest.approx(sum(before) - len(before))
        # Never more even than the bound, never less even than before: sums over the same rounds.
        sums = [value(after, "imbalance_excess_ratio_sum", when=when) for when in ("bound", "after", "before")]
        assert sums == sorted(sums)
        assert sums[1] < sums[2]
        assert value(after, "saved_seconds_total") > 0
        assert value(after, "exposed_wait_seconds_total") >= value(after, "agreement_wait_seconds_total")
        assert value(after, "redistribution_seconds_total") == pytest.approx(totals.redistribution_seconds)
        assert value(after, "agreement_wait_seconds_total") == pytest.approx(totals.exposed_seconds)
        assert value(after, "dropped_samples_total") == totals.dropped_samples > 0
        assert value(after, "partition_seconds_total") == pytest.approx(searched)  # once for each window
        assert value(after, "breaker_open") == 0
        assert 0 < value(after, "moved_bytes_total") < value(after, "batch_bytes_total")
    assert len({value(result["after"], "moved_bytes_total") for result in results}) == 1  # shares of the job's bytes
    assert list(tmp_path.iterdir()) == []  # target files are gone


def test_a_program_that_ends_takes_its_target_away(tmp_path: Path) -> None:
    program = f"""
from trainer_client.observing.metrics import RankExporter
exporter = RankExporter.start(job="ended", rank=0, host="0.0.0.0", targets={str(tmp_path)!r})
import json, pathlib, socket
(path,) = pathlib.Path({str(tmp_path)!r}).glob("*.json")
assert json.loads(path.read_text()) == [{{"targets": [f"{{socket.gethostname()}}:{{exporter.port}}"]}}]
raise RuntimeError("training failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "training failed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_addresses_are_written_as_prometheus_reads_them(tmp_path: Path) -> None:
    for host, advertise, expected in (
        ("127.0.0.1", None, "127.0.0.1:"), ("::1", None, "[::1]:"), ("0.0.0.0", "gpu-7.example", "gpu-7.example:"),
    ):  # fmt: skip
        with RankExporter.start(job="a/b", rank=1, host=host, advertise=advertise, targets=tmp_path) as exporter:
            target = json.loads((tmp_path / "a_b-1.json").read_text())
        assert target == [{"targets": [f"{expected}{exporter.port}"]}]


def test_series_stay_bounded() -> None:
    with RankExporter.start(job="bounded", rank=0) as exporter:
        for number in range(5000):
            exporter.measures.key_skew(f"table_{number}", 1.5)
            exporter.measures.waited(f"loader_{number}", 0.1)
        samples = scrape(exporter.port)
    assert sum(name == "evenkeel_trainer_key_skew_ratio" for name, _ in samples) == 201
    assert sum(name == "evenkeel_trainer_exposed_wait_seconds_total" for name, _ in samples) == 17
    assert value(samples, "exposed_wait_seconds_total", loader="other") == pytest.approx(0.1 * (5000 - 16))


def test_the_skew_of_keys_is_measured_now_and_then() -> None:
    from torchrec import KeyedJaggedTensor

    def batch(*hot: int) -> KeyedJaggedTensor:
        """Feature `even` has a key of each rank of four, `hot` three of rank 1 and one of rank 2."""
        return KeyedJaggedTensor.from_lengths_sync(
            keys=["even", "hot", "none"],
            values=torch.tensor([0, 1, 2, 3, *hot]),
            lengths=torch.tensor([2, 2, len(hot), 0, 0, 0]),
        )

    with RankExporter.start(job="keys", rank=0) as exporter:
        for keys in ((1, 5, 9, 2), (0, 0, 0, 0), (0, 0, 0, 0), (1, 2, 3, 0)):
            exporter.keys(batch(*keys), world_size=4, routing="roundrobin", every=3)
            if keys[0] == 1 and keys[1] == 5:
                first = scrape(exporter.port)
        last = scrape(exporter.port)
        with pytest.raises(ValueError, match="2 routings"):
            exporter.keys(batch(1), world_size=4, routing=["roundrobin", "roundrobin"], every=1)
    assert value(first, "key_skew_ratio", table="even") == 1.0
    assert value(first, "key_skew_ratio", table="hot") == 3.0
    assert value(last, "key_skew_ratio", table="hot") == 1.0
    assert not [pairs for name, pairs in last if "key_skew" in name and ("table", "none") in pairs]


def test_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENKEEL_METRICS_PORT", raising=False)
    assert RankExporter.from_env(job="job", rank=0) is None
    monkeypatch.setenv("EVENKEEL_METRICS_PORT", "0")
    monkeypatch.setenv("EVENKEEL_METRICS_HOST", "")  # as where a template has left it out
    exporter = RankExporter.from_env(job="job", rank=3)
    with exporter:
        assert value(scrape(exporter.port), "info", rank="3") == 1


@pytest.mark.parametrize(
    ("variable", "setting", "said"),
    [
        ("PORT", "many", "EVENKEEL_METRICS_PORT is 'many'; give a port number"),
        ("PORT", "70000", "port is 70000"),
        ("PORT", "{taken}", "in use"),
        ("TARGETS", "/dev/none", r"targets is '/dev/none', where no file can be written: No such file"),
        ("HOST", "no.such.host.invalid", r"metrics cannot be served on no\.such\.host\.invalid:0: "),
    ],
)
def test_what_cannot_be_served_or_written_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, setting: str, said: str
) -> None:
    monkeypatch.setenv("EVENKEEL_METRICS_PORT", "0")
    with RankExporter.start(job="job", rank=0) as first:
        monkeypatch.setenv(f"EVENKEEL_METRICS_{variable}", setting.format(taken=first.port))
        with pytest.raises((ValueError, OSError), match=said):
            RankExporter.from_env(job="job", rank=0)
