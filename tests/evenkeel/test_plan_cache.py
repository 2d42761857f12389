import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import evenkeel
from evenkeel.placement import Plan, PlanRequest, Runtime, Status, Table, Topology, builtin_profile, plan
from evenkeel.plan_cache import PlanCache, sealed
from evenkeel.planner_client import PlannerClient

REQUEST = PlanRequest(
    tables=(Table(name="user", rows=1_000_000, dim=32, ids_per_sample=5), Table(name="item", rows=5_000, dim=16)),
    topology=Topology(ranks=2, hbm_bytes=2 << 30, host_bytes=8 << 30),
)


class _Counted:
    """A planner that counts its plans."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.cache, self.plans = PlanCache(folder=folder, max_bytes=max_bytes), 0

    def ask(self, request: PlanRequest) -> Plan:
        def make() -> Plan:
            self.plans += 1
            return plan(request)

        return self.cache.plan(request, make)


def test_the_same_request_is_planned_once_however_it_is_written(tmp_path: Path) -> None:
    counted = _Counted(tmp_path / "not" / "there")
    first = counted.ask(REQUEST)
    assert first.status is Status.OPTIMAL
    user = replace(REQUEST.tables[0], ids_per_sample=5.0)
    same = (
        REQUEST,
        replace(REQUEST, tables=(user, REQUEST.tables[1])),
        replace(REQUEST, hardware=builtin_profile("h200")),
        replace(REQUEST, solver=replace(REQUEST.solver, time_limit_s=3)),
    )
    assert [counted.ask(each) for each in same] == [first] * 4
    assert counted.plans == 1


def test_whatever_a_plan_follows_from_makes_another_one(tmp_path: Path) -> None:
    counted = _Counted(tmp_path)
    profile = builtin_profile("h200")
    calibrated = replace(profile, intra_host_bytes_per_s=profile.intra_host_bytes_per_s * 1.01)
    different = (
        REQUEST,
        replace(REQUEST, hardware=calibrated),
        replace(REQUEST, runtime=Runtime.TORCHREC),
        replace(REQUEST, topology=replace(REQUEST.topology, hbm_bytes=3 << 30)),
        replace(REQUEST, solver=replace(REQUEST.solver, gap=0.01)),
        replace(REQUEST, tables=REQUEST.tables[::-1]),
    )
    for number, each in enumerate(different):
        assert counted.ask(each) == plan(each)
        assert counted.plans == number + 1


def test_plans_of_a_process_whose_files_were_replaced_are_not_those_of_the_new_code(tmp_path: Path) -> None:
    shutil.copytree(Path(str(evenkeel.__file__)).parent, tmp_path / "evenkeel")
    program = """
import sys
from pathlib import Path
from evenkeel.placement import PlanRequest, Table, Topology, plan
from evenkeel.plan_cache import PlanCache
request = PlanRequest(tables=(Table(name="t", rows=9, dim=8),), topology=Topology(ranks=1, hbm_bytes=1 << 30))
if sys.argv[1]:
    with open(sys.argv[1], "a") as code:
        code.write("\\n")
PlanCache(folder=Path("plans")).plan(request, lambda: plan(request))
"""
    code, profile = "evenkeel/placement/search.py", "evenkeel/placement/profiles/h200.json"
    for change, kept in ((code, 1), ("", 2), (profile, 2), ("", 3), ("", 3)):
        subprocess.run(
            [sys.executable, "-c", program, change], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, check=True
        )
        assert len([*(tmp_path / "plans").iterdir()]) == kept


def test_what_is_not_proved_is_not_kept(tmp_path: Path) -> None:
    counted = _Counted(tmp_path)
    nothing = replace(REQUEST, topology=replace(REQUEST.topology, hbm_bytes=1 << 20, host_bytes=1 << 20))
    assert counted.ask(nothing).status is Status.INFEASIBLE
    cache = PlanCache(folder=tmp_path)
    found = replace(plan(REQUEST), status=Status.FEASIBLE)
    assert cache.plan(REQUEST, lambda: found) is found
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_give_way_and_those_asked_for_stay(tmp_path: Path) -> None:
    requests = [replace(REQUEST, topology=replace(REQUEST.topology, hbm_bytes=(2 << 30) + n)) for n in range(4)]
    counted = _Counted(tmp_path)
    counted.ask(requests[0])
    size = next(tmp_path.iterdir()).stat().st_size
    counted = _Counted(tmp_path, max_bytes=int(size * 2.5))
    for age, path in enumerate(tmp_path.iterdir()):
        os.utime(path, (age, age))
    counted.ask(requests[1])
    for path in tmp_path.iterdir():
        os.utime(path, (path.stat().st_mtime - 1_000,) * 2)
    counted.ask(requests[0])
    assert counted.plans == 1
    counted.ask(requests[2])  # requests[1] goes
    assert len(list(tmp_path.iterdir())) == 2
    counted.ask(requests[0])
    assert counted.plans == 2
    counted.ask(requests[1])
    assert counted.plans == 3


def test_what_ended_processes_left_unfinished_gives_way_too(tmp_path: Path) -> None:
    left = tmp_path / "evenkeel-x1.part"
    others = [tmp_path / name for name in ("notes.txt", "film.part", "my.plan", "evenkeel-notes.txt")]
    for path in (left, *others):
        path.write_bytes(bytes(1 << 20))
        os.utime(path, (0, 0))
    _Counted(tmp_path).ask(REQUEST)
    assert not left.exists()
    assert all(path.exists() for path in others)
    assert len([*tmp_path.glob("evenkeel-*.plan")]) == 1


def _another_request(whole: bytes) -> bytes:
    kept = json.loads(whole.partition(b"\n")[2])
    kept["request"]["topology"]["hbm_bytes"] += 1
    return json.dumps(kept).encode()


def test_what_is_no_whole_plan_of_the_request_is_planned_again_and_replaced(tmp_path: Path) -> None:
    counted = _Counted(tmp_path)
    first = counted.ask(REQUEST)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    others = (b"", b"no plan", b'{"format": "evenkeel-plan"}', b"\xff", b"[" * 100_000, _another_request(whole))
    altered = (whole[:80] + whole[80:].replace(b"0", b"1", 1), whole[: len(whole) // 2], whole[:-1], whole + b" ")
    for number, harmed in enumerate((*others, *map(sealed, others), *altered)):
        assert harmed != whole
        path.write_bytes(harmed)
        assert [counted.ask(REQUEST), counted.ask(REQUEST)] == [first, first]
        assert path.read_bytes() == whole
        assert counted.plans == number + 2


def test_a_folder_that_is_none_costs_no_plan(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="plans are not kept in .*file"):
        assert _Counted(tmp_path / "file").ask(REQUEST) == plan(REQUEST)


def test_the_variable_keeps_plans_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = PlannerClient.from_env({"EVENKEEL_PLAN_CACHE": str(tmp_path)})
    first = client.plan(REQUEST)
    monkeypatch.setattr("evenkeel.planner_client.plan", lambda _: pytest.fail("planned again"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PlannerClient.from_env({"EVENKEEL_PLAN_CACHE": str(tmp_path)}).plan(REQUEST) == first
