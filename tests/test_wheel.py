"""The wheel, installed alone where a user has packages of our folders' names."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

USE = """
import services, protos
assert services.MINE and protos.MINE
import evenkeel, trainer_client
from evenkeel.partitioning import partition
for package in (evenkeel, trainer_client):
    assert "installed" in package.__file__, package.__file__
plan = partition([5, 1, 1, 5], [0, 0, 1, 1], 2)
assert plan.imbalance == 1.0, plan
from trainer_client import BalancedLoader, Balancer
import torch
batches = [{"x": torch.arange(3)}, {"x": torch.arange(2)}]
with Balancer.embedded() as balancer:
    loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["x"])
    assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2], [0, 1]]
import evenkeel.protocol.balancer_pb2
print("works")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    return next(folder.glob("*.whl"))


def test_it_holds_the_trainers_library_and_nothing_generic(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"evenkeel", "trainer_client"}
    assert {"evenkeel/py.typed", "trainer_client/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_works_beside_a_users_packages_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "installed"
    venv.create(environment)
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name a checkout
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)],
        check=True, timeout=110, env=variables,
    )  # fmt: skip
    for package in ("evenkeel", "trainer_client"):
        for kernel in ROOT.glob(f"{package}/**/__pycache__/*.nb?"):  # compiled from the same sources, or not taken
            copy = site / kernel.relative_to(ROOT)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(kernel, copy)
    # The libraries that it needs, without this checkout: .pth files are not followed a second time.
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name in ("services", "protos"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    result = subprocess.run([str(python), "-c", USE], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert result.stdout.strip() == "works", result.stderr
    command = subprocess.run(
        [str(environment / "bin" / "evenkeel"), "--version"], env=variables, capture_output=True, text=True
    )
    assert command.stdout.startswith("evenkeel "), command.stderr
