from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.balancer.decisions import Reason, identity
from services.balancer.effects import Decided, SessionId
from services.balancer.metrics import Metrics
from services.balancer.submissions import SessionKey
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank


async def test_rounds_are_counted_and_measured_over_http(start_server: StartServer) -> None:
    server = await start_server(metrics_port=0)
    async with Rank(server.port, 0, 1) as rank:
        await rank.round(0, [1, 2])
        await rank.round(1, [1, 2])
        with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60) as reply:
            text = reply.read().decode()
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["evenkeel_balancer_rounds_total", "balanced", "job", "none"] == 2
    assert values["evenkeel_balancer_round_wait_seconds_count", "job"] == 2
    assert values["evenkeel_balancer_partition_seconds_count",] == 2
    assert values["evenkeel_balancer_samples_total", "job"] == 4
    assert values["evenkeel_balancer_sessions",] == 1
    assert values["evenkeel_balancer_streams",] == 1


def test_jobs_beyond_a_callers_share_of_the_labels_share_one() -> None:
    metrics = Metrics(max_jobs=4)
    for caller, job in (
        ("greedy", "a"),
        ("greedy", "b"),
        ("greedy", "c"),
        ("greedy", "d"),
        ("modest", "e"),
        ("greedy", "a"),
    ):
        session = SessionId(SessionKey(job, "", ""), "run", 0)
        metrics.decided(Decided(session, 0, identity(Reason.DEADLINE, ""), 0.25, None, caller))
    counts = {
        job: metrics.registry.get_sample_value(
            "evenkeel_balancer_rounds_total", {"job": job, "outcome": "identity", "reason": "deadline"}
        )
        for job in ("a", "b", "c", "d", "e", "other")
    }
    assert counts == {"a": 2, "b": 1, "c": None, "d": None, "e": 1, "other": 2}
    waited = metrics.registry.get_sample_value("evenkeel_balancer_round_wait_seconds_sum", {"job": "other"})
    assert waited == pytest.approx(0.5)
