from __future__ import annotations

import pytest

from benchmarks.placement_model import MEASURED, measured_request, measurement, predicted_mib
from evenkeel.placement import builtin_profile, builtin_profiles
from evenkeel.placement.fitted_costs import fit_costs, predict_seconds
from evenkeel.placement.hardware import parse_profile, profile_json


@pytest.fixture(scope="module")
def samples() -> list[object]:
    asked = measured_request()
    return [measurement(asked, row) for row in MEASURED]


@pytest.mark.parametrize("first", [0, 1])
def test_half_of_the_measurements_predicts_the_other_half(samples: list[object], first: int) -> None:
    profile = builtin_profile("h200")
    costs = fit_costs(profile, samples[first::2])  # type: ignore[arg-type]
    for row, sample in list(zip(MEASURED, samples, strict=True))[1 - first :: 2]:
        ample = row.cache_per_unique is None or row.cache_per_unique >= 8
        predicted = predict_seconds(profile, costs, sample) * 1e3  # type: ignore[arg-type]
        assert predicted == pytest.approx(row.milliseconds, rel=0.2 if ample else 0.5)


@pytest.mark.parametrize("half", [slice(0, None, 2), slice(1, None, 2), slice(None)])
def test_the_modes_come_in_the_measured_order(samples: list[object], half: slice) -> None:
    profile = builtin_profile("h200")
    costs = fit_costs(profile, samples[half])  # type: ignore[arg-type]
    predicted = [predict_seconds(profile, costs, sample) for sample in samples]  # type: ignore[arg-type]
    order = sorted(range(len(MEASURED)), key=lambda i: MEASURED[i].milliseconds)
    assert sorted(range(len(MEASURED)), key=lambda i: predicted[i]) == order


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.mode}-{row.ratio}")
def test_predicted_memory_covers_what_was_in_use_within_a_tenth(row: object) -> None:
    mib = predicted_mib(measured_request(), row)  # type: ignore[arg-type]
    assert row.device_mib <= mib <= 1.1 * row.device_mib  # type: ignore[attr-defined]


def test_unique_keys_agree_with_those_measured(samples: list[object]) -> None:
    assert sum(load.unique for load in samples[0].loads) == pytest.approx(173_500, rel=1e-3)  # type: ignore[attr-defined]


def test_profiles_survive_json_and_name_their_source() -> None:
    for profile in builtin_profiles().values():
        assert parse_profile(profile_json(profile)) == profile
        assert profile.source
        assert profile.date
