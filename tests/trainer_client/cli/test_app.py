"""The list of commands: there at once, wherever it is asked for."""

import subprocess
import sys

import pytest

HELP = """
import sys
{}
from trainer_client.cli import main
sys.argv = ["evenkeel", "--help"]
try:
    main()
finally:
    loaded = [name for name in ("torch", "numpy", "scipy", "numba", "grpc") if sys.modules.get(name)]
    assert not loaded, loaded
"""
WITHOUT_TORCH = "sys.modules['torch'] = None"


@pytest.mark.parametrize("given", ["", WITHOUT_TORCH])
def test_help_lists_every_command_and_loads_none(given: str) -> None:
    shown = subprocess.run([sys.executable, "-c", HELP.format(given)], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for command in ("plan", "calibrate", "checkpoint", "doctor", "top", "warm-up"):
        assert f" {command} " in shown.stdout
    assert ("PyTorch is not installed here" in shown.stdout) == bool(given)


@pytest.mark.parametrize("arguments", [["checkpoint", "inspect", "."], ["calibrate"]])
def test_a_command_that_needs_torch_says_so(arguments: list[str]) -> None:
    program = f"import sys; {WITHOUT_TORCH}; from trainer_client.cli import main; main()"
    shown = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert shown.returncode in (1, 2)
    assert "torch" in shown.stderr.lower()
    assert "install" in shown.stderr
