"""What no request may say is refused wherever an object is made or read, with its path, its value and a remedy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from evenkeel.placement import InvalidInputError, Mode, PlanRequest, Table, builtin_profile, parse_topology, what_if
from evenkeel.placement.access import power_law
from evenkeel.placement.calibration import measured_samples
from evenkeel.placement.fields import decode, encode
from evenkeel.placement.plan_file import loads
from tests.evenkeel.placement.instances import random_tables, request

STEP: dict[str, Any] = {"name": "a", "samples": 8, "parts": [{"count": 1, "rows": 9}], "seconds": 1.0}
H200 = encode(builtin_profile("h200"))
ITEM = {"name": "item", "rows": 1000, "dim": 8}
LFU = ITEM | {"eviction": "lfu"}
NO_SHARES = {"kind": "miss_curve", "cache_fractions": [0], "miss_rates": [1], "unique_fraction": 1}
FALLING = NO_SHARES | {"cache_fractions": [0.5, 0.2], "miss_rates": [0.1, 0.2]}


def request_of(**parts: Any) -> PlanRequest:
    topology = {"ranks": 2, "hbm_bytes": 1 << 30} | parts.pop("topology", {})
    return decode(PlanRequest, {"tables": [ITEM], "topology": topology} | parts)


def table_of(**fields: Any) -> PlanRequest:
    return request_of(tables=[ITEM | fields])


def histogram(keys: list[float], lookups: list[float]) -> PlanRequest:
    return table_of(access={"kind": "histogram", "keys": keys, "lookups": lookups})


def profile_of_width(width: float) -> PlanRequest:
    profile = json.loads(json.dumps(H200))
    profile["hbm_gather"][0][0] = width
    return request_of(hardware=profile)


@pytest.mark.parametrize(
    ("make", "field", "remedy"),
    [
        (lambda: table_of(rows=0), "tables[0].rows", "give a whole number from 1 to 1000000000000"),
        (lambda: table_of(rows=True), "tables[0].rows", "whole number"),
        (lambda: what_if(request_of(), points=3, hbm_bytes=(1 << 30,)), "points", "give one of the two"),
        (lambda: table_of(rows="400m"), "tables[0].rows", "without quotes unless it has a unit"),
        (lambda: table_of(ids_per_sample=float("nan")), "tables[0].ids_per_sample", "give a number from 0 to 1e+06"),
        (lambda: table_of(ids_per_sample=10**400), "tables[0].ids_per_sample", "below 1e308"),
        (lambda: table_of(score_words=3), "tables[0].score_words", "use one of: 1, 2"),
        (lambda: table_of(name=""), "tables[0].name", "give 1 to 512 characters"),
        (lambda: table_of(name="\ud800"), "tables[0].name", "valid Unicode"),
        (lambda: table_of(group="x" * 513), "tables[0].group", "give 0 to 512 characters"),
        (lambda: table_of(dist_type="by_moon"), "tables[0].dist_type", "use one of: continuous, roundrobin, hash_ro"),
        (lambda: table_of(data_type="int8"), "tables[0].data_type", "use one of"),
        (lambda: table_of(ratio=1.5), "tables[0].ratio", "give a number from 0 to 1"),
        (lambda: table_of(ratio=1.0, modes=["CACHING"]), "tables[0].ratio", ""),
        (lambda: table_of(sharding=[]), "tables[0].sharding", ""),
        (lambda: table_of(sharding=["row_wise", "row_wise"]), "tables[0].sharding", ""),
        (lambda: table_of(sharding="grid_shard"), "tables[0].sharding", ""),
        (lambda: table_of(sharding=["row_wise", "table_wise"], column_shards=2), "tables[0].column_shards", ""),
        (lambda: table_of(sharding="column_wise", column_shards=16), "tables[0].column_shards", "a divisor of dim=8"),
        (lambda: histogram([1, 0], [1, 1]), "tables[0].access.keys[1]", "from 1e-09"),
        (lambda: histogram([1], [0]), "tables[0].access.lookups", ""),
        (lambda: histogram([], []), "tables[0].access.keys", "give 1 to 100000 items"),
        (lambda: table_of(access=NO_SHARES), "tables[0].access.cache_fractions[0]", "above 0, at most 1"),
        (lambda: table_of(access=FALLING), "tables[0].access.cache_fractions[1]", ""),
        (lambda: table_of(access={"kind": "zipf", "exponent": 11}), "tables[0].access.exponent", "from 0 to 10"),
        (lambda: table_of(access={}), "tables[0].access.kind", ""),
        (lambda: request((Table(name="t", rows=10, dim=8, access=power_law(1.0, 11)),), hbm_gib=1, runtime="torchrec"),
         "tables[0].access.keys", ""),
        (lambda: request(random_tables(1, 0, modes=(Mode.HYBRID,)), hbm_gib=1, runtime="torchrec"),
         "tables[0].modes", ""),
        (lambda: table_of(sharding="table_wise"), "tables[0].sharding", ""),
        (lambda: table_of(sharding="column_wise", column_shards=2, pooled=True), "tables[0].sharding", ""),
        (lambda: table_of(sharding="data_parallel"), "tables[0].sharding", ""),
        (lambda: table_of(score_words=2), "tables[0].score_words", ""),
        (lambda: request_of(tables=[LFU], runtime="torchrec", step={"prefetch_depth": 2}), "tables[0].eviction", ""),
        (lambda: request(random_tables(1, 0) * 2, hbm_gib=1), "tables[1].name", ""),
        (lambda: request_of(tables=[]), "tables", "give 1 to 20000 items"),
        (lambda: decode(PlanRequest, {"topology": {"ranks": 1, "hbm_bytes": 1}}), "tables", "give it"),
        (lambda: request_of(topology={"ranks": 8, "ranks_per_host": 3}), "topology.ranks_per_host", "divisor of ranks"),
        (lambda: request_of(topology={"ranks": "8"}), "topology.ranks", ""),
        (lambda: request_of(topology={"hbm_bytes": -1}), "topology.hbm_bytes", ""),
        (lambda: request_of(topology={"gpus": 2}), "topology.gpus", ""),
        (lambda: request_of(topology={"hbm_reserved_fraction": float("nan")}), "topology.hbm_reserved_fraction", ""),
        (lambda: request_of(hardware="z80"), "hardware", ""),
        (lambda: profile_of_width(float("inf")), "hardware.hbm_gather[0][0]", ""),
        (lambda: profile_of_width(0), "hardware.hbm_gather[0][0]", ""),
        (lambda: loads('{"request": {"step": 1, "step": 2}}'), "plan file: request.step", "keep one of them"),
        (lambda: parse_topology("h200"), "topology", ""),
        (lambda: parse_topology("h200x99999"), "topology", ""),
        (lambda: measured_samples([STEP | {"parts": []}]), "whole_steps[0].parts", ""),
        (lambda: measured_samples([STEP | {"seconds": 0}]), "whole_steps[0].seconds", ""),
        (lambda: measured_samples([STEP | {"ranks": 0}]), "whole_steps[0].ranks", ""),
        (lambda: measured_samples([STEP | {"parts": [{"count": 0, "rows": 9}]}]), "whole_steps[0].parts[0].count", ""),
        (lambda: measured_samples([5]), "whole_steps[0]", ""),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused_with_its_path_and_remedy(
    make: Callable[[], object], field: str, remedy: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert caught.value.field == field
    assert caught.value.remedy
    assert remedy in caught.value.remedy
    copy = pickle.loads(pickle.dumps(caught.value))  # as between processes
    assert (str(copy), copy.field, repr(copy.value)) == (str(caught.value), field, repr(caught.value.value))
