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
    for command in ("gain", "plan", "calibrate", "checkpoint", "doctor", "top", "warm-up"):
        assert f" {command} " in shown.stdout
    assert ("PyTorch is not installed here" in shown.stdout) == bool(given)


@pytest.mark.parametrize("arguments", [["checkpoint", "inspect", "."], ["calibrate"]])
def test_a_command_that_needs_torch_says_so(arguments: list[str]) -> None:
    program = f"import sys; {WITHOUT_TORCH}; from trainer_client.cli import main; main()"
    shown = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert shown.returncode in (1, 2)
    assert "torch" in shown.stderr.lower()
    assert "install" in shown.stderr


COMMANDS = [
    ["top", "127.0.0.1:1", "--count", "1"], ["doctor", "--balancer", "127.0.0.1:1"],
    ["plan", "none.json"], ["calibrate", "--raw"], ["checkpoint", "inspect", "."], ["warm-up", "--help"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_command_without_grpcio_says_what_to_install_or_does_not_need_it(arguments: list[str]) -> None:
    program = "import sys; sys.modules['grpc'] = None; from trainer_client.cli import main; main()"
    shown = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert "Traceback" not in shown.stderr
    if arguments[0] == "doctor":
        assert shown.returncode == 2
        assert shown.stderr.startswith("error: a balancer's calls need grpcio and protobuf: pip install")
        assert shown.stderr.count("\n") == 1
