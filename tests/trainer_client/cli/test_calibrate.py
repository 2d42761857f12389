from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.references.dynamicemb_steps import MEASURED, ROWS
from evenkeel.placement import Runtime, builtin_profile
from evenkeel.placement.calibration import calibrated_profile, fit_runtime, measured_steps
from evenkeel.placement.hardware import parse_profile
from trainer_client.cli.calibrate import calibrate_command
from trainer_client.planning.measuring import measure

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(calibrate_command)
    return app


def test_this_machine_is_measured_and_its_profile_written(command: typer.Typer, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    flags = ["--device", "cpu", "--table-gib", "0.01", "--output", str(output), "--name", "mine"]
    shown = CliRunner().invoke(command, flags)
    assert shown.exit_code == 0, shown.output
    profile = parse_profile(json.loads(output.read_text()))
    assert profile.name == "mine"
    assert [width for width, _ in profile.hbm_gather] == [128, 512, 2048]
    assert all(rate > 0 for _, rate in profile.host_gather)
    assert profile.runtimes == builtin_profile("h200").runtimes


def test_fbgemms_measured_steps_are_fitted_within_a_tenth() -> None:
    raw = json.loads((RESULTS / "calibration_h200.json").read_text())
    _, errors = fit_runtime(builtin_profile("h200"), Runtime.TORCHREC, measured_steps(raw["kernels"]["torchrec"]))
    assert {error.mode.value for error in errors} == {"HBM_ONLY", "CACHING", "HOST_ONLY"}
    for error in errors:
        assert error.predicted_s == pytest.approx(error.measured_s, rel=0.1)


def test_predicted_bytes_are_what_fbgemm_allocated() -> None:
    import numpy as np

    from evenkeel.placement import Mode, Optimizer, Table
    from evenkeel.placement.storage_torchrec import torchrec_footprint

    raw = json.loads((RESULTS / "calibration_h200.json").read_text())
    for record in raw["kernels"]["torchrec"]:
        table = Table(name="t", rows=record["rows"], dim=record["dim"], optimizer=Optimizer(record["optimizer"]))
        ratio = np.array([record["ratio"]])
        footprint = torchrec_footprint(table, Mode(record["mode"]), ratio, table.rows, table.dim, training=True)
        predicted = record["tables"] * int(footprint.hbm[0])
        # A kernel has few allocations, each of which may be up to a MiB larger than what was asked for.
        assert record["table_bytes"] <= predicted + (4 << 20)
        assert predicted <= 1.1 * record["table_bytes"] + (8 << 20)


def test_dynamicemb_steps_of_ones_own_are_fitted(command: typer.Typer, tmp_path: Path) -> None:
    raw, steps, output = tmp_path / "raw.json", tmp_path / "steps.json", tmp_path / "out.json"
    raw.write_text((RESULTS / "calibration_h200.json").read_text())
    records = [
        {"mode": row.mode.value, "ratio": row.ratio, "seconds": row.milliseconds / 1e3, "tables": 2}
        | {"rows": ROWS, "dim": 128, "ids": 262_144}
        for row in MEASURED
    ]
    steps.write_text(json.dumps(records))
    shown = CliRunner().invoke(
        command, ["--raw", str(raw), "--dynamicemb-steps", str(steps), "-o", str(output), "--json"]
    )
    assert shown.exit_code == 0, shown.output
    costs = parse_profile(json.loads(shown.stdout)).costs(Runtime.DYNAMICEMB)
    assert costs.caching_fixed_s == pytest.approx(
        builtin_profile("h200").costs(Runtime.DYNAMICEMB).caching_fixed_s, rel=0.15
    )


def test_narrow_rows_are_not_slower_than_embedding_kernels_gather_them() -> None:
    raw = json.loads((RESULTS / "calibration_h200.json").read_text())
    base = builtin_profile("h200")
    profile, _ = calibrated_profile(base, raw, "mine", {})
    assert profile.hbm_gather[-1] == pytest.approx(raw["hbm_gather"][-1])
    for (_, rate), (_, known) in zip(profile.hbm_gather, base.hbm_gather, strict=True):
        assert rate / known == pytest.approx(profile.hbm_gather[-1][1] / base.hbm_gather[-1][1])
    quick = raw | {"hbm_gather": [[128, 1e12], [512, 1e12], [2048, 2e12]]}
    assert calibrated_profile(base, quick, "mine", {})[0].hbm_gather[0] == (128.0, 1e12)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "hbm_gather"), ("nothing", "Expecting value"), ('{"kernels": {"torchrec": [{"mode": "FAST"}]}}', "mode")],
)
def test_raw_figures_that_are_none_are_refused(
    command: typer.Typer, tmp_path: Path, content: str, message: str
) -> None:
    raw = tmp_path / "raw.json"
    raw.write_text(content)
    shown = CliRunner().invoke(command, ["--raw", str(raw), "-o", str(tmp_path / "out.json")])
    assert shown.exit_code == 2
    assert message in shown.output


def test_measuring_says_what_it_measures() -> None:
    told: list[str] = []
    found = measure("cpu", table_bytes=1 << 20, gathered_rows=256, repeats=2, progress=told.append)
    assert found["kernels"] == {}
    assert any("gathers" in what for what in told)


def test_a_profile_outlives_a_file_that_cannot_be_written(command: typer.Typer, tmp_path: Path) -> None:
    raw, output = RESULTS / "calibration_h200.json", tmp_path / "no" / "profile.json"
    shown = CliRunner().invoke(command, ["--raw", str(raw), "--output", str(output)])
    assert shown.exit_code == 2
    assert parse_profile(json.loads(shown.stdout)).name == "calibrated"
    assert f"--output: {output}: No such file or directory" in shown.stderr


@pytest.mark.parametrize("flag", ["--raw", "--dynamicemb-steps"])
def test_files_that_cannot_be_read_are_named_with_what_to_do(command: typer.Typer, tmp_path: Path, flag: str) -> None:
    given = {"--raw": RESULTS / "calibration_h200.json", flag: tmp_path / "raw.json"}
    flags = [str(part) for pair in given.items() for part in pair]
    for content, said in ((None, "cannot be read"), ('{"a": 1 "b"}', "is no JSON: Expecting ',' delimiter")):
        if content is not None:
            (tmp_path / "raw.json").write_text(content)
        shown = CliRunner().invoke(command, [*flags, "--output", str(tmp_path / "profile.json")])
        assert shown.exit_code == 2
        assert f"error: {tmp_path / 'raw.json'}: {said}" in shown.stderr


@pytest.mark.parametrize("content", ["[]", "{}", "{", "5"])
def test_what_are_no_measurements_is_refused(command: typer.Typer, tmp_path: Path, content: str) -> None:
    raw = tmp_path / "raw.json"
    raw.write_text(content)
    shown = CliRunner().invoke(command, ["--raw", str(raw), "--output", str(tmp_path / "profile.json")])
    assert (shown.exit_code, shown.exception and type(shown.exception)) == (2, SystemExit)
    assert "error: " in shown.stderr


def test_raw_figures_are_kept_and_whole_steps_fitted(command: typer.Typer, tmp_path: Path) -> None:
    raw, kept, output = (tmp_path / name for name in ("raw.json", "kept.json", "out.json"))
    steps = json.loads((RESULTS / "placement_gpu_steps_2xh200.json").read_text())["rows"]
    raw.write_text(json.dumps(json.loads((RESULTS / "calibration_h200.json").read_text()) | {"whole_steps": steps}))
    shown = CliRunner().invoke(command, ["--raw", str(raw), "--keep-raw", str(kept), "--output", str(output)])
    assert shown.exit_code == 0, shown.output
    assert "whole steps of torchrec, GPUs: 2" in shown.output
    assert json.loads(kept.read_text()) == json.loads(raw.read_text())
    costs = parse_profile(json.loads(output.read_text())).costs(Runtime.TORCHREC).step
    assert costs is not None
    assert 1e-3 < costs.host_s + costs.exchange_host_s < 5e-3


def test_a_profile_outlives_raw_figures_that_cannot_be_kept(command: typer.Typer, tmp_path: Path) -> None:
    raw, output = RESULTS / "calibration_h200.json", tmp_path / "out.json"
    kept = tmp_path / "no" / "kept.json"
    shown = CliRunner().invoke(command, ["--raw", str(raw), "--keep-raw", str(kept), "--output", str(output)])
    assert shown.exit_code == 2
    assert f"--keep-raw: {kept}: No such file or directory" in shown.stderr
    assert parse_profile(json.loads(output.read_text())).name == "calibrated"


def test_without_a_gpu_the_remedy_is_told(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = CliRunner().invoke(command, ["--output", str(tmp_path / "profile.json")])
    assert shown.exit_code == 2
    assert "--device cuda: PyTorch finds no GPU here; run this where the job will run, or give --device cpu" in (
        shown.stderr
    )
