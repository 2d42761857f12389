"""The trace of a step: from two real ranks through a real balancer, and what becomes of it without a collector."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.harness.ranks import run_ranks
from services.balancer.server import BalancerServer
from services.balancer.settings import Settings
from tests.trainer_client.balancing.jobs import Job, check_complete, run_job
from trainer_client.balancing import tracing

STEPS, EVERY = 6, 2
SECONDS = 60.0


@contextlib.contextmanager
def balancer(spans: SimpleSpanProcessor | None = None, endpoint: str | None = None) -> Iterator[str]:
    """The address of a balancer on an event loop of its own."""
    address: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        settings = Settings(port=0, drain_seconds=0.0, grace_seconds=2.0, workers=1, trace_endpoint=endpoint)
        server, stop = BalancerServer(settings, spans=spans), asyncio.Event()
        await server.start()
        address.set_result((f"127.0.0.1:{server.port}", asyncio.get_running_loop(), stop))
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    where, loop, stop = address.result(240)
    try:
        yield where
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(SECONDS)
        assert not thread.is_alive()


def read_span(span: ReadableSpan) -> dict[str, Any]:
    return {
        "name": span.name, "trace": span.context.trace_id, "id": span.context.span_id,
        "parent": span.parent.span_id if span.parent else 0, "begin": span.start_time, "end": span.end_time,
        "attributes": {key.removeprefix("evenkeel."): value for key, value in span.attributes.items()},
        "links": [(link.context.trace_id, link.context.span_id, dict(link.attributes)) for link in span.links],
    }  # fmt: skip


def traced_job(rank: int, job: Job, every: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    exporter = InMemorySpanExporter()
    tracing.start(processor=SimpleSpanProcessor(exporter), every=every)
    records = run_job(rank, job)
    spans = [read_span(span) for span in exporter.get_finished_spans()]
    tracing.stop()
    return records, spans


def test_a_step_is_one_trace_of_all_ranks_and_the_balancer() -> None:
    exporter = InMemorySpanExporter()
    with balancer(SimpleSpanProcessor(exporter)) as address:
        job = Job(steps=(STEPS, STEPS), address=address, name="traced")
        results = run_ranks(2, traced_job, job, EVERY)
    check_complete(job, [records for records, _ in results])
    of_rank = [spans for _, spans in results]
    of_service = [read_span(span) for span in exporter.get_finished_spans()]
    for step in range(0, STEPS, EVERY):
        roots = []
        for rank, spans in enumerate(of_rank):
            mine = [span for span in spans if span["attributes"]["step"] == step]
            (root,) = [span for span in mine if span["name"] == "step"]
            assert root["parent"] == 0
            assert (root["attributes"]["job"], root["attributes"]["session"]) == ("traced", "traced/default/train")
            assert root["attributes"]["rank"] == rank
            assert root["attributes"]["mode"] == "service"
            assert root["attributes"]["imbalance"] <= root["attributes"]["imbalance_before"]
            parts = [span for span in mine if span is not root]
            assert {"submit", "wait", "agree", "redistribute"} <= {span["name"] for span in parts}
            for span in parts:
                assert (span["trace"], span["parent"]) == (root["trace"], root["id"])
                assert root["begin"] <= span["begin"] <= span["end"] <= root["end"]
            order = {span["name"]: span["begin"] for span in parts}
            assert order["submit"] <= order["wait"] <= order["agree"] <= order["redistribute"]
            roots.append(root)
        assert len({root["trace"] for root in roots}) == 1
        served = [span for span in of_service if span["attributes"]["step"] == step]
        (meeting,) = [span for span in served if span["name"] == "round"]
        assert meeting["trace"] == roots[0]["trace"]
        assert meeting["parent"] == roots[0]["id"]
        assert [link[:2] for link in meeting["links"]] == [(root["trace"], root["id"]) for root in roots]
        assert [link[2]["evenkeel.rank"] for link in meeting["links"]] == [0, 1]
        assert min(link[2]["evenkeel.late_seconds"] for link in meeting["links"]) == 0.0
        assert (meeting["attributes"]["job"], meeting["attributes"]["outcome"]) == ("traced", "balanced")
        parts = {span["name"]: span for span in served if span is not meeting}
        assert set(parts) == {"gather", "partition", "answer"}
        assert {span["parent"] for span in parts.values()} == {meeting["id"]}
        assert meeting["begin"] == parts["gather"]["begin"] <= parts["gather"]["end"] == parts["partition"]["begin"]
        assert parts["partition"]["end"] == parts["answer"]["begin"] <= parts["answer"]["end"] == meeting["end"]
    assert {span["trace"] for span in of_service} <= {span["trace"] for span in of_rank[0]}
    assert {span["attributes"]["step"] % EVERY for spans in (*of_rank, of_service) for span in spans} == {0}


def embedded_job(rank: int, job: Job) -> list[dict[str, Any]]:
    return traced_job(rank, job, 1)[1]


def test_without_a_service_the_partition_is_in_the_trace() -> None:
    results = run_ranks(2, embedded_job, Job(steps=(3, 3), name="alone"))
    for step in range(3):
        traces = set()
        for spans in results:
            names = {span["name"]: span for span in spans if span["attributes"]["step"] == step}
            assert {"step", "submit", "agree", "partition", "redistribute"} <= set(names)
            assert "wait" not in names
            assert names["step"]["attributes"]["mode"] == "embedded"
            traces.add(names["step"]["trace"])
        assert len(traces) == 1


def job_by_environment(rank: int, job: Job, endpoint: str) -> tuple[list[dict[str, Any]], float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENKEEL_TRACE_ENDPOINT", endpoint)
        patch.setenv("EVENKEEL_TRACE_EVERY", "1")
        records = run_job(rank, job)
        started = time.monotonic()
        tracing.stop()
        return records, time.monotonic() - started


@pytest.mark.parametrize("listens", [False, True])
def test_a_collector_that_is_gone_or_silent_costs_no_round(listens: bool) -> None:
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if listens:
            collector.listen()  # and says nothing
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        with balancer(endpoint=endpoint) as address:
            job = Job(steps=(STEPS, STEPS), address=address, name=f"lost-{listens}")
            results = run_ranks(2, job_by_environment, job, endpoint)
    check_complete(job, [records for records, _ in results])
    assert {record["mode"] for records, _ in results for record in records} == {"service"}
    assert max(seconds for _, seconds in results) < 30  # told to end within 2 s


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: dict[str, list[Any]] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    name = next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
                    for scope in group.scope_spans:
                        collector.spans.setdefault(name, []).extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


def test_spans_reach_a_collector() -> None:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with balancer(endpoint=endpoint) as address:
            job = Job(steps=(3, 3), address=address, name="collected")
            run_ranks(2, job_by_environment, job, endpoint)
        collector.shutdown()
    ranks, service = collector.spans["evenkeel-trainer"], collector.spans["evenkeel-balancer"]
    assert {span.name for span in service} == {"round", "gather", "partition", "answer"}
    assert {span.trace_id for span in service} <= {span.trace_id for span in ranks}
    assert {len(span.links) for span in service if span.name == "round"} == {2}


@pytest.mark.parametrize("endpoint", ["collector:4318", "", "grpc://collector"])
def test_an_endpoint_must_be_a_url(endpoint: str) -> None:
    with pytest.raises(ValueError, match="OTLP over HTTP"):
        tracing.start(endpoint)
    with pytest.raises(ValueError, match="every is 0"):
        tracing.start("http://collector:4318", every=0)


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"job": "j", "group": "g", "loader": "l", "run": "r", "rank": 0}
    monkeypatch.delenv("EVENKEEL_TRACE_ENDPOINT", raising=False)
    assert tracing.tracer_of(**names) is None
    monkeypatch.setenv("EVENKEEL_TRACE_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("EVENKEEL_TRACE_EVERY", "often")
    with pytest.raises(ValueError, match="EVENKEEL_TRACE_EVERY is 'often'"):
        tracing.tracer_of(**names)
