import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from evenkeel.placement import Plan, PlanRequest, parse_topology, plan
from evenkeel.placement.fields import TimeIsUpError, decode, encode
from evenkeel.placement.plan_file import PlanFile, dumps
from evenkeel.placement.report import Report, make_report
from evenkeel.plan_cache import sealed
from services.planner.answers import WhatIfRequest, answer, read_request
from services.planner.app import create_app
from services.planner.settings import Settings
from tests.services.planner.serving import Served, served
from tests.waiting import until

JOB: dict[str, Any] = {
    "tables": [
        {"name": "user", "rows": 40_000_000, "dim": 128},
        {"name": "item", "rows": 5_000_000, "dim": 128, "ids_per_sample": 50},
        {"name": "city", "rows": 20_000, "dim": 32},
    ],
    "topology": {"ranks": 8, "hbm_bytes": 5 << 30, "host_bytes": 400 << 30},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("planner"), "--workers", "1", "--queue-size", "1") as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as open_client:
        yield open_client


def _slow_job(seed: int = 0) -> dict[str, Any]:
    """Many groups with nearly equal choices, which take long to prove."""
    tables = [
        {
            "name": f"t{i}",
            "rows": 1_000_000 + 7919 * ((i * i + seed) % 977),
            "dim": 64,
            "group": f"module_{i % 10}",
            "ids_per_sample": 3,
        }
        for i in range(50)
    ]
    topology = {"ranks": 8, "hbm_bytes": 3_500_000_000, "host_bytes": 40 << 30}
    return {"tables": tables, "topology": topology, "solver": {"ratio_steps": 60, "time_limit_s": 20, "gap": 0}}


def test_a_plan_is_the_cores_plan(client: httpx.Client) -> None:
    answer = client.post("/v1/plans", json=JOB)
    assert answer.status_code == 200
    found = decode(Plan, answer.json()["plan"])
    assert found == plan(decode(PlanRequest, JOB))
    assert "DynamicEmbTableOptions" in answer.json()["code"]
    assert decode(Report, answer.json()["report"]) == make_report(decode(PlanRequest, JOB), found)
    assert client.post("/v1/plans", json=JOB).content == answer.content
    file = dumps(PlanFile(request=decode(PlanRequest, JOB), plan=found))
    assert client.post("/v1/plans", content=file).content == answer.content


def test_head_is_get_without_its_body(client: httpx.Client) -> None:
    for path in ("/", "/healthz", "/v1/hardware-profiles", "/openapi.json"):
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]


def test_what_does_not_fit_is_an_answer_not_an_error(client: httpx.Client) -> None:
    answer = client.post("/v1/plans", json={**JOB, "topology": {"ranks": 8, "hbm_bytes": 10**9, "host_bytes": 10**9}})
    assert answer.status_code == 200
    assert answer.json()["plan"]["status"] == "INFEASIBLE"
    assert answer.json()["plan"]["shortage"]["explanation"]
    assert answer.json()["code"] == ""
    assert answer.json()["report"] is None


def test_what_if_hit_rates_and_profiles_answer(client: httpx.Client) -> None:
    curve = client.post("/v1/whatif", json={**JOB, "points": 6}).json()["curve"]
    assert len(curve) == 6
    rates = client.post("/v1/hit-rates", json={"rows": 1000, "lookups_per_step": 500, "cache_rows": [0, 1000]}).json()
    assert rates["miss_rates"][0] == 1
    names = [profile["name"] for profile in client.get("/v1/hardware-profiles").json()]
    assert "h200" in names
    profile = client.get("/v1/hardware-profiles/h200").json()
    assert (
        client.post("/v1/plans", json={**JOB, "hardware": profile}).json() == client.post("/v1/plans", json=JOB).json()
    )


TABLE = {"name": "a", "rows": 5, "dim": 4}
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tables": [{**TABLE, "rows": "5"}]}, "tables[0].rows"),
    ({"tables": [TABLE] * 2}, "tables[1].name"),
    ({"tables": [{**TABLE, "color": "red"}]}, "tables[0].color"),
    ({"tables": [{}] * 5001}, "tables"),
    ({"tables": []}, "tables"),
    ({"topology": "h300x8"}, "topology"),
    ({"hardware": "abacus"}, "hardware"),
    ({"hardware": {"name": "mine"}}, "hardware.device"),
]
ROWS = '{"topology": "h200x8", "tables": [{"name": "a", "dim": 4, "rows": %s}]}'
BODIES: list[tuple[bytes, int, dict[str, str]]] = [
    (b'{"tables": [],,}', 400, {"field": "body", "problem": "line 1, column 15", "value": ",,}"}),
    (b"[1, 2]", 422, {}),
    (b'{"topology": "h200x8"}', 422, {"field": "tables", "problem": "is missing"}),
    (b'{"format": "evenkeel-plan", "measured": 5}', 422, {}),
    (b"\xff\xfe", 400, {"value": "b'\\xff\\xfe'"}),
    (b"[" * 100_000, 400, {}),
    (b"", 400, {}),
    (b'{"\\ud800": 1, "topology": {"ranks": 1, "hbm_bytes": 1}}', 422, {}),
    (b'{"topology": "h200x8", "solver": {"gap": 1' + b"0" * 400 + b"}}", 422, {}),
    ((ROWS % ("9" * 5000)).encode(), 422, {"field": "tables[0].rows"}),
    ((ROWS % '5, "rows": 6').encode(), 422, {"field": "tables[0].rows", "problem": "twice"}),
]
PATHS = [
    ("PUT", "/v1/plans", 405, {}), ("GET", "/v1/plan", 404, {"remedy": "/v1/plans"}),
    ("GET", "/v1/hardware-profiles/abacus", 404, {}), ("GET", "/page/..%2fapp.py", 404, {}),
]  # fmt: skip
Wrong = tuple[str, str, bytes, str, int, dict[str, str]]  # method, path, body, its type, status, and of the first error
JSON = "application/json"
WRONG: list[Wrong] = [
    *(
        ("POST", "/v1/plans", json.dumps({**JOB, **change}).encode(), JSON, 422, {"field": field})
        for change, field in FIELDS
    ),
    *(("POST", "/v1/plans", body, JSON, status, told) for body, status, told in BODIES),
    *((method, path, b"{}", JSON, status, told) for method, path, status, told in PATHS),
    ("POST", "/v1/plans", b"<plan/>", "application/xml", 415, {"value": "application/xml"}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong[1]} {wrong[2][:60]!r}")
def test_every_error_is_a_problem_document_that_names_the_field(client: httpx.Client, wrong: Wrong) -> None:
    method, path, body, kind, status, told = wrong
    answer = client.request(method, path, content=body, headers={"Content-Type": kind})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    document = answer.json()
    assert {"type", "title", "status", "detail", "instance"} <= document.keys()
    for found in document["errors"] or [{}]:
        assert all(found.get(part) for part in ("field", "value", "problem", "remedy")), found
    for part, text in told.items():
        found = document["errors"][0][part]
        assert found == text if part == "field" else text in found


def test_a_time_limit_that_is_over_while_the_request_is_read_is_named(client: httpx.Client) -> None:
    tables = [{"name": str(number), "rows": 1000, "dim": 8} for number in range(1000)]
    answer = client.post("/v1/plans", json={**JOB, "tables": tables, "solver": {"time_limit_s": 0.01}})
    assert answer.status_code in (422, 503)  # by whom it is found out depends on how fast the machine is
    assert answer.json()["errors"][0]["field"] == "solver.time_limit_s"


@pytest.mark.parametrize("kind", [PlanRequest, WhatIfRequest])
def test_a_time_limit_that_is_over_while_tables_are_priced_is_named_as_it_was_sent(kind: type[PlanRequest]) -> None:
    tables = [{"name": str(number), "rows": 1_000_003 + number, "dim": 64} for number in range(1500)]
    body = {"tables": tables, "topology": "h100x8", "runtime": "torchrec", "solver": {"time_limit_s": 1}}
    asked = read_request(kind, json.dumps(body).encode(), Settings())
    begin = time.monotonic()
    with pytest.raises(TimeIsUpError, match=r"\(got 1\.0\); give more time, fewer tables"):
        answer(asked, begin + 0.05, 1 << 40)  # reading took the rest
    assert time.monotonic() - begin < 1


def _processes(parent: int) -> list[int]:
    """Processes that descend from one."""
    found: list[int] = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_processes(child)]
    return found


def test_a_request_that_needs_more_memory_says_so_and_lost_processes_are_replaced(tmp_path: Path) -> None:
    with served(tmp_path, "--worker-memory-bytes", "30000000") as running:
        tables = [{"name": str(number), "rows": 10**9, "dim": 8} for number in range(3000)]
        answer = httpx.post(f"{running.url}/v1/plans", json={**JOB, "tables": tables}, timeout=60, trust_env=False)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:evenkeel:problem:too-costly")
        for process in _processes(running.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        small = {**JOB, "tables": JOB["tables"][2:]}
        plans = f"{running.url}/v1/plans"
        until(lambda: httpx.post(plans, json=small, timeout=60, trust_env=False).status_code == 200)


def test_a_search_answers_with_the_plan_that_it_has_when_its_time_is_up(client: httpx.Client) -> None:
    limit = 0.8
    asked = _slow_job() | {"solver": {"ratio_steps": 60, "time_limit_s": limit, "gap": 0}}
    asked["topology"] = {"ranks": 8, "hbm_bytes": 6_000_000_000, "host_bytes": 400 << 30}
    found = client.post("/v1/plans", json=asked)
    assert found.elapsed.total_seconds() < limit + 1.5
    if found.status_code == 503:  # a slow machine had not priced all tables by then
        assert found.json()["errors"][0]["field"] == "solver.time_limit_s"
    else:
        assert found.status_code == 200, found.text
        assert found.json()["plan"]["bound_seconds"] <= found.json()["plan"]["seconds"]


def test_topologies_and_quantities_are_taken_as_the_command_line_does(client: httpx.Client) -> None:
    short = {"tables": [{**JOB["tables"][0], "rows": "40M"}], "topology": "h200x8"}
    name, machines = parse_topology("h200x8")
    whole = {
        "tables": JOB["tables"][:1],
        "topology": encode(replace(machines, hbm_reserved_fraction=0.15)),
        "hardware": name,
    }
    assert client.post("/v1/plans", json=short).json() == client.post("/v1/plans", json=whole).json()


def test_a_hundred_megabytes_are_refused(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * (1 << 20)

    for content in (b"x" * (100 << 20), chunks()):
        try:
            answer = client.post("/v1/plans", content=content)
        except httpx.WriteError:
            continue  # Refused while still sending.
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/healthz").status_code == 200


def _metric(service: Served, name: str, text: str | None = None) -> float:
    """The sum of a metric's series; of a text that was scraped already, since ten scrapes a second are rendered."""
    text = text or httpx.get(f"{service.metrics_url}/metrics", trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_a_search_is_given_up_when_the_client_goes_away_and_a_full_queue_refuses(service: Served) -> None:
    before = _metric(service, "evenkeel_planner_cancelled_total")
    host, port = service.url.removeprefix("http://").split(":")
    body = json.dumps(_slow_job()).encode()
    head = (
        f"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sockets = []
    for number in range(2):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + body)
        sockets.append(connection)
        gauge = ("evenkeel_planner_running_requests", "evenkeel_planner_waiting_requests")[number]
        until(lambda gauge=gauge: _metric(service, gauge) == 1)
    refused = httpx.post(f"{service.url}/v1/plans", json=JOB, trust_env=False)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert httpx.get(f"{service.url}/healthz", trust_env=False).status_code == 200
    for connection in sockets:
        connection.close()
    until(lambda: _metric(service, "evenkeel_planner_cancelled_total") > before, 10)  # its own limit is longer
    until(lambda: _metric(service, "evenkeel_planner_running_requests") == 0, 10)
    assert httpx.post(f"{service.url}/v1/plans", json=JOB, timeout=60, trust_env=False).status_code == 200
    assert "never awaited" not in service.log.read_text()


def test_health_and_metrics_have_a_port_of_their_own(service: Served) -> None:
    for path in ("healthz", "readyz"):
        assert httpx.get(f"{service.url}/{path}", trust_env=False).status_code == 200
        assert httpx.get(f"{service.metrics_url}/{path}", trust_env=False).status_code == 200
    assert httpx.get(f"{service.url}/metrics", trust_env=False).status_code == 404
    assert _metric(service, 'evenkeel_planner_requests_total{route="/v1/plans",status="200"}') > 0


async def test_an_error_of_our_own_is_counted_as_one() -> None:
    app = create_app(Settings())  # not started, so that it has no pool
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as client:
        assert (await client.post("/v1/plans", json=JOB)).status_code == 500
    counted = {"route": "/v1/plans", "status": "500"}
    assert app.state.metrics.registry.get_sample_value("evenkeel_planner_requests_total", counted) == 1


def test_plans_are_counted_by_outcome_gap_and_binding_budget(service: Served, client: httpx.Client) -> None:
    binding = 'evenkeel_planner_infeasible_plans_total{{binding="{}"}}'.format
    names = ["evenkeel_planner_plan_gap_ratio_count", "evenkeel_planner_solve_duration_seconds_count"]
    names += [binding(name) for name in ("hbm", "host", "both")]

    def counts() -> dict[str, float]:
        text = httpx.get(f"{service.metrics_url}/metrics", trust_env=False).text
        assert text.count("\nevenkeel_planner_infeasible_plans_total{") == 3, "every series is there from the start"
        return {name: _metric(service, name, text) for name in names}

    time.sleep(1.1)  # what earlier tests scraped is rendered no more
    expected = counts()
    for hbm, host in ((5 << 30, 400 << 30), (1 << 20, 400 << 30), (1 << 30, 1 << 30)):
        small = {**JOB, "topology": {"ranks": 8, "hbm_bytes": hbm, "host_bytes": host}}
        found = client.post("/v1/plans", json=small).json()["plan"]
        assert found["status"] == ("OPTIMAL" if hbm == 5 << 30 else "INFEASIBLE")
        expected[names[1]] += 1
        expected[names[0] if found["status"] == "OPTIMAL" else binding(found["shortage"]["binding"])] += 1
    assert expected[binding("hbm")] >= 1
    until(lambda: counts() == expected)


def test_a_plan_that_is_kept_is_given_again_by_another_service(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    with served(tmp_path, "--plan-cache", str(folder)) as running:
        first = httpx.post(f"{running.url}/v1/plans", json=JOB, timeout=60, trust_env=False).json()
    (path,) = folder.iterdir()
    content = json.loads(path.read_bytes().partition(b"\n")[2])
    content["plan"]["hbm"]["used_bytes"] += 1  # so that it tells that it was kept
    path.write_bytes(sealed(json.dumps(content).encode()))
    with served(tmp_path, "--plan-cache", str(folder)) as running:
        later = {**JOB, "solver": {"time_limit_s": 20}}
        again = httpx.post(f"{running.url}/v1/plans", json=later, timeout=60, trust_env=False).json()
        other = {**JOB, "hardware": "h100"}
        assert httpx.post(f"{running.url}/v1/plans", json=other, timeout=60, trust_env=False).status_code == 200
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
    first["plan"]["hbm"]["used_bytes"] += 1
    assert again == first
    assert len(list(folder.iterdir())) == 2
