"""`evenkeel calibrate`: a profile that fits what was measured, and files that it reads and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenkeel.placement import Mode, Optimizer, Runtime, Table, builtin_profile
from evenkeel.placement.calibration import calibrated_profile, fit_runtime, measured_steps, predictor
from evenkeel.placement.hardware import parse_profile
from evenkeel.placement.storage import torchrec_footprint
from tests.evenkeel.placement.dynamicemb_steps import MEASURED, ROWS
from tests.trainer_client.cli.conftest import Run

RECORDED = Path(__file__).parents[2] / "evenkeel" / "placement" / "measured"
RAW = RECORDED / "calibration_h200.json"
VALUES = json.loads(RAW.read_text())
KERNELS = VALUES["kernels"]["torchrec"]


def test_this_machine_is_measured_and_its_profile_written(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    shown = run("calibrate", "--device", "cpu", "--table-gib", "0.01", "--output", output, "--name", "mine")
    assert shown.exit_code == 0, shown.output
    profile = parse_profile(json.loads(output.read_text()))
    assert profile.name == "mine"
    assert [width for width, _ in profile.hbm_gather] == [128, 512, 2048]
    assert all(rate > 0 for _, rate in profile.host_gather)
    assert profile.runtimes == builtin_profile("h200").runtimes


def test_fbgemms_measured_steps_are_fitted_within_a_tenth() -> None:
    _, fitted = fit_runtime(builtin_profile("h200"), Runtime.TORCHREC, measured_steps(KERNELS))
    assert {step.mode.value for step, _ in fitted} == {"HBM_ONLY", "CACHING", "HOST_ONLY"}
    for step, predicted in fitted:
        assert predicted == pytest.approx(step.seconds, rel=0.1)


def test_what_kernels_take_in_every_mode_alike_is_not_held_against_caches() -> None:
    base = builtin_profile("h100")
    known, steps = base.costs(Runtime.TORCHREC), measured_steps(KERNELS)
    alike = replace(known, hbm_fixed_s=2e-3, caching_fixed_s=2e-3, host_fixed_s=2e-3)  # exchanges of large rows
    steps = tuple(replace(one, seconds=predictor(base, Runtime.TORCHREC, one)(alike)) for one in steps)
    fitted, _ = fit_runtime(base, Runtime.TORCHREC, steps)
    assert fitted.cache_lookup_s == pytest.approx(known.cache_lookup_s, rel=0.1)
    assert fitted.miss_factor == pytest.approx(known.miss_factor, rel=0.1)


def test_one_measured_shape_moves_what_was_fitted_to_many_of_the_same_gpu_but_little() -> None:
    base = builtin_profile("h100")
    slower = [one | {"seconds": one["seconds"] * (1.2 if one["mode"] == "HOST_ONLY" else 1)} for one in KERNELS]
    moved = {}
    for device in ("NVIDIA H100 80GB HBM3", "a card of tomorrow"):
        raw = VALUES | {"device": device}
        found = [
            calibrated_profile(base, raw, "mine", {Runtime.TORCHREC: measured_steps(steps)})[0].costs(Runtime.TORCHREC)
            for steps in (KERNELS, slower)
        ]
        moved[device] = found[1].host_factor / found[0].host_factor
    same, other = moved.values()
    assert 1 < same < 1.06
    assert other > 1.15


def test_what_is_not_measured_is_of_the_profile_of_the_gpus_name(run: Run, tmp_path: Path) -> None:
    raw, output = tmp_path / "raw.json", tmp_path / "out.json"
    for device, name in (("NVIDIA H100 80GB HBM3", "h100"), ("a card of tomorrow", "h200")):
        raw.write_text(json.dumps(VALUES | {"device": device}))
        assert run("calibrate", "--raw", raw, "-o", output).exit_code == 0
        found = parse_profile(json.loads(output.read_text()))
        assert found.costs(Runtime.DYNAMICEMB) == builtin_profile(name).costs(Runtime.DYNAMICEMB)


def test_predicted_bytes_are_what_fbgemm_allocated() -> None:
    for record in KERNELS:
        table = Table(name="t", rows=record["rows"], dim=record["dim"], optimizer=Optimizer(record["optimizer"]))
        ratio = np.array([record["ratio"]])
        hbm, *_ = torchrec_footprint(table, Mode(record["mode"]), ratio, table.rows, table.dim, training=True)
        predicted = record["tables"] * int(hbm[0])
        # A kernel has few allocations, each of which may be up to a MiB larger than what was asked for.
        assert record["table_bytes"] <= predicted + (4 << 20)
        assert predicted <= 1.1 * record["table_bytes"] + (8 << 20)


def test_dynamicemb_steps_of_ones_own_are_fitted(run: Run, tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    records = [
        {"mode": row.mode.value, "ratio": row.ratio, "seconds": row.milliseconds / 1e3, "tables": 2}
        | {"rows": ROWS, "dim": 128, "ids": 262_144}
        for row in MEASURED
    ]
    steps.write_text(json.dumps(records))
    shown = run("calibrate", "--raw", RAW, "--dynamicemb-steps", steps, "-o", tmp_path / "out.json", "--json")
    assert shown.exit_code == 0, shown.output
    fitted, known = (
        profile.costs(Runtime.DYNAMICEMB)
        for profile in (parse_profile(json.loads(shown.stdout)), builtin_profile("h200"))
    )
    assert fitted.caching_fixed_s == pytest.approx(known.caching_fixed_s, rel=0.15)


def test_raw_figures_are_kept_and_whole_steps_fitted(run: Run, tmp_path: Path) -> None:
    raw, kept, output = (tmp_path / name for name in ("raw.json", "kept.json", "out.json"))
    steps = json.loads((RECORDED / "steps_2xh200.json").read_text())["rows"]
    raw.write_text(json.dumps(VALUES | {"whole_steps": steps}))
    shown = run("calibrate", "--raw", raw, "--keep-raw", kept, "--output", output)
    assert shown.exit_code == 0, shown.output
    assert "whole steps of torchrec, GPUs: 2" in shown.output
    assert json.loads(kept.read_text()) == json.loads(raw.read_text())
    costs = parse_profile(json.loads(output.read_text())).costs(Runtime.TORCHREC).step
    assert costs is not None
    assert 1e-3 < costs.host_s + costs.exchange_host_s < 5e-3


@pytest.mark.parametrize("flag", ["--output", "--keep-raw"])
def test_a_profile_outlives_a_file_that_cannot_be_written(run: Run, tmp_path: Path, flag: str) -> None:
    output, missing = tmp_path / "profile.json", tmp_path / "no" / "file.json"
    shown = run("calibrate", "--raw", RAW, "--output", output, flag, missing)
    assert shown.exit_code == 2
    assert f"{flag}: {missing}: No such file or directory" in shown.stderr
    profile = output.read_text() if flag == "--keep-raw" else shown.stdout
    assert parse_profile(json.loads(profile)).name == "calibrated"


@pytest.mark.parametrize("flag", ["--raw", "--dynamicemb-steps"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1 "b"}', "raw.json: is no JSON: Expecting ',' delimiter"),
        ("nothing", "Expecting value"),
        ("5", "these are no measurements of a machine"),
        ("[[]]", ""),
        ("{}", ""),
        ('{"kernels": {"torchrec": [{"mode": "FAST"}]}}', ""),
    ],
)
def test_what_are_no_measurements_is_refused(run: Run, tmp_path: Path, flag: str, content: str, message: str) -> None:
    (tmp_path / "raw.json").write_text(content)
    files = {"--raw": RAW, flag: tmp_path / "raw.json", "--output": tmp_path / "profile.json"}
    shown = run("calibrate", *(part for pair in files.items() for part in pair))
    assert (shown.exit_code, shown.stderr.startswith("error: "), message in shown.stderr) == (2, True, True), (
        shown.output
    )


def test_files_that_are_not_there_are_refused(run: Run, tmp_path: Path) -> None:
    for flag in ("--raw", "--dynamicemb-steps"):
        shown = run("calibrate", flag, "lost.json", "--output", tmp_path / "profile.json")
        assert (shown.exit_code, f"'{flag}': file 'lost.json' does not exist" in shown.stderr) == (2, True), (
            shown.stderr
        )


def test_without_a_gpu_the_remedy_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = run("calibrate", "--output", tmp_path / "profile.json")
    assert shown.exit_code == 2
    remedy = "PyTorch finds no GPU here; run this where the job will run, or give --device cpu"
    assert f"--device cuda: {remedy}" in shown.stderr
