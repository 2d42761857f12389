"""The walks of ARCHITECTURE.md are walked: each step exists, and real runs call them in this order."""

from __future__ import annotations

import functools
import importlib
import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from benchmarks.harness.balancer_process import fork
from benchmarks.harness.ranks import run_ranks
from evenkeel import partitioning
from services.operations.launch import running_service
from tests.docs.traced import traced

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
Places = list[tuple[str, list[str]]]


def _walk(title: str) -> Places:
    """The places of a walk, such as `On the rank`, each with its steps."""
    section = TEXT.split(f"### {title}\n")[1].split("\n#")[0]
    return [
        (place, re.findall(r"^\d+\. `([\w.]+:[\w.]+)`", steps, re.M))
        for place, steps in re.findall(r"^(\w[\w ]+):\n\n((?:\d+\. .*\n|   .*\n)+)", section + "\n", re.M)
    ]


def _function(step: str) -> Any:
    module, name = step.split(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _mentions(code: CodeType, name: str, module: ModuleType, seen: set[CodeType]) -> bool:
    """Whether a function, or one of its module that it calls, names another."""
    if code in seen:
        return False
    seen.add(code)
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    near = [getattr(module, other, None) for other in code.co_names]
    inner += [
        other.__code__
        for other in near
        if getattr(other, "__module__", "") == module.__name__ and hasattr(other, "__code__")
    ]
    return name in code.co_names or any(_mentions(other, name, module, seen) for other in inner)


def _follow(places: Places, traces: dict[str, list[str]]) -> Iterator[str]:
    """What is wrong with a walk, given what was called where, in the order of the first calls."""
    reached = dict.fromkeys(traces, -1)
    for place, steps in places:
        for number, step in enumerate(steps):
            function = _function(step)
            if place in traces:
                at = traces[place].index(step) if step in traces[place] else None
                if at is None:
                    yield f"{step} is not called {place.lower()}"
                elif at <= reached[place]:
                    yield f"{step} is called earlier than the step before it"
                reached[place] = reached[place] if at is None else at
            elif number:
                before = _function(steps[number - 1])
                module = importlib.import_module(steps[number - 1].split(":")[0])
                if not _mentions(before.__code__, function.__name__, module, set()):
                    yield f"{steps[number - 1]} does not call {step}"


def _train(rank: int, address: str) -> list[str]:
    partitioning.warm_up()
    from trainer_client import BalancedLoader, Balancer, BatchSpec, TokenCost

    data = [{"n": torch.tensor([1, 2, 30 + 70 * rank]), "items": torch.arange(33 + 70 * rank)} for _ in range(4)]
    with traced() as called:
        balancer = Balancer.connect(address, job="walk")
        spec = BatchSpec(rows_per_sample={"items": "n"})
        loader = BalancedLoader(data, balancer, cost=TokenCost(tokens="n"), spec=spec)
        assert len([time.sleep(0.3) for _ in loader]) == 4  # so that the service answers in time
        balancer.close()
    return list(called)


def test_from_costs_to_moved_samples(tmp_path: Path) -> None:
    file = tmp_path / "names"
    with running_service(
        "tests.docs.traced", spawn=fork, TRACED_MODULE="services.balancer", TRACED_FILE=str(file)
    ) as one:
        rank, _ = run_ranks(2, _train, one.address)
        assert one.stop() == 0
    places = _walk("From costs to moved samples")
    assert len(places) == 4
    traces = {"On the rank": rank, "At the lead": rank, "On the balancer": file.read_text().split("\n")}
    assert list(_follow(places, traces)) == []


def test_a_plan_request(tmp_path: Path) -> None:
    from evenkeel.placement import PlanRequest, Step, Table, Topology
    from trainer_client.planning import PlannerClient

    file = tmp_path / "names"
    request = PlanRequest(
        tables=(Table(name="items", rows=10_000_000, dim=64),),
        topology=Topology(ranks=2, hbm_bytes=8 << 30, host_bytes=64 << 30),
        step=Step(samples_per_rank=256),
    )
    with running_service(
        "tests.docs.traced", spawn=fork, TRACED_MODULE="services.planner", TRACED_FILE=str(file)
    ) as one:
        with traced() as client:
            assert PlannerClient(url=f"http://{one.address}").plan(request).placements
        assert one.stop() == 0
    places = _walk("A plan request")
    assert len(places) == 6
    assert list(_follow(places, {"At the client": list(client), "On the planner": file.read_text().split("\n")})) == []


def _look_up(rank: int) -> list[str]:
    from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable

    table = RoutedTable(name="items", embedding_dim=4, features=("item",), num_embeddings=100, pooling="sum")
    collection = RoutedEmbeddingCollection([table], device=torch.device("cpu"))
    batch = KeyBatch(features=("item",), values=torch.arange(6) + rank, lengths=torch.tensor([2, 4]), batch_sizes=(2,))
    collection(batch)  # what is imported and loaded at first takes long when traced
    with traced() as called:
        collection(batch)["item"].sum().backward()
    return list(called)


def test_from_a_key_to_its_row() -> None:
    rank, _ = run_ranks(2, _look_up)
    places = _walk("From a key to its row")
    assert len(places) == 1
    assert list(_follow(places, {"On the rank": rank})) == []


def test_what_is_wrong_is_found() -> None:
    step, other = "evenkeel.partitioning.api:partition", "evenkeel.partitioning.slices:slice_plan"
    here = "In the worker"
    assert list(_follow([("On the rank", [step, other])], {"On the rank": [step, other]})) == []
    assert len(list(_follow([("On the rank", [step, other])], {"On the rank": [other, step]}))) == 1
    assert len(list(_follow([("On the rank", [step, other])], {"On the rank": [step]}))) == 1
    assert len(list(_follow([(here, [step, other])], {}))) == 1  # a partition is not what cuts a plan
    assert list(_follow([(here, ["evenkeel.partitioning.stages:slice_round", other])], {})) == []


def test_there_are_few_words() -> None:
    words = re.findall(r"^\| \*\*([\w ]+)\*\* \|", TEXT, re.M)
    assert 10 <= len(words) <= 20


def test_the_drawing_shows_what_the_linter_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    checked = {
        contract["containers"][0]: [set(layer.split(" | ")) for layer in contract["layers"]]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if "containers" in contract
    }
    drawn = {}
    for floor in re.split(r"^─+$", TEXT.split("```")[1], flags=re.M)[1:]:
        for column in zip(*(f"{line}│".split("│")[:2] for line in floor.strip("\n").split("\n")), strict=True):
            rows = [row.split() for row in column if row.strip()]
            if rows:
                drawn[rows[0][0]] = [set(row) for row in rows[1:]]
    assert drawn == checked
