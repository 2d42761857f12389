"""What values fields may have: said in annotations, checked wherever an object is made."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from evenkeel.placement import InvalidInputError, PlanRequest, builtin_profile
from evenkeel.placement.fields import decode, encode

TABLE: dict[str, Any] = {"name": "item", "rows": 1000, "dim": 8}


def request_of(table: dict[str, Any]) -> PlanRequest:
    return decode(PlanRequest, {"tables": [{**TABLE, **table}], "topology": {"ranks": 2, "hbm_bytes": 1 << 30}})


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"rows": 0}, "rows", "give a whole number from 1 to 1000000000000"),
        ({"rows": True}, "rows", "whole number"),
        ({"rows": "400m"}, "rows", "without quotes unless it has a unit"),
        ({"ids_per_sample": float("nan")}, "ids_per_sample", "give a number from 0 to 1e\\+06"),
        ({"ids_per_sample": 10**400}, "ids_per_sample", "below 1e308"),
        ({"score_words": 3}, "score_words", "use one of: 1, 2"),
        ({"name": ""}, "name", "give 1 to 512 characters"),
        ({"name": "\ud800"}, "name", "valid Unicode"),
        ({"group": "x" * 513}, "group", "give 0 to 512 characters"),
        ({"dist_type": "x" * 101}, "dist_type", "use one of: continuous, roundrobin, hash_roundrobin"),
        ({"ratio": 1.5}, "ratio", "give a number from 0 to 1"),
        ({"column_shards": 16, "sharding": "column_wise"}, "column_shards", "a divisor of dim=8"),
        ({"access": {"kind": "histogram", "keys": [1, 0], "lookups": [1, 1]}}, r"access.keys\[1\]", "from 1e-09"),
        ({"access": {"kind": "histogram", "keys": [], "lookups": []}}, "access.keys", "give 1 to 100000 items"),
        (
            {"access": {"kind": "miss_curve", "cache_fractions": [0], "miss_rates": [1], "unique_fraction": 1}},
            r"access.cache_fractions\[0\]",
            "above 0, at most 1",
        ),
        ({"access": {"kind": "zipf", "exponent": 11}}, "access.exponent", "from 0 to 10"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_path_and_remedy(
    change: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"^tables\[0\]\.{field}: .*{remedy}"):
        request_of(change)


@pytest.mark.parametrize("width", [float("inf"), float("nan"), 0, 1e10])
def test_row_widths_of_a_profile_are_numbers_of_bytes(width: float) -> None:
    value = json.loads(json.dumps(encode(builtin_profile("h200"))))
    value["hbm_gather"][-1][0] = width
    body = {"topology": {"ranks": 2, "hbm_bytes": 1 << 30}, "hardware": value}
    index = len(value["hbm_gather"]) - 1
    with pytest.raises(InvalidInputError, match=rf"^hardware\.hbm_gather\[{index}\]\[0\]: is out of range"):
        decode(PlanRequest, body)


def test_an_error_goes_from_process_to_process() -> None:
    error = InvalidInputError("tables[0].rows", 0, "is out of range", "give more")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.field, copy.value) == (str(error), error.field, error.value)
