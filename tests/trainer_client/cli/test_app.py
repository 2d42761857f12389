"""The list of commands: there at once, wherever it is asked for; and what commands share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_client.cli.conftest import Run
from trainer_client.cli import main

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


@pytest.mark.parametrize("given", ["", "sys.modules['torch'] = None"])
def test_help_lists_every_command_and_loads_none(given: str) -> None:
    shown = subprocess.run([sys.executable, "-c", HELP.format(given)], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for command in ("gain", "plan", "calibrate", "checkpoint", "doctor", "top", "warm-up"):
        assert f" {command} " in shown.stdout
    assert ("PyTorch is not installed here" in shown.stdout) == bool(given)


WITHOUT = """
import json, sys
sys.modules["torch"] = sys.modules["grpc"] = None
from contextlib import redirect_stderr
from io import StringIO
from trainer_client.cli import main
said = []
for command in json.loads(sys.argv[1]):
    sys.argv = ["evenkeel", *command]
    with redirect_stderr(StringIO()) as errors:
        try:
            main()
        except SystemExit as ended:
            said.append((ended.code, errors.getvalue()))
print("said", json.dumps(said), sep="\\n")
"""


def test_what_a_command_needs_is_said_and_nothing_else_is_needed() -> None:
    """Beside neither library; `tests/test_imports` has the modules that need torch without gRPC."""
    commands = {"checkpoint inspect .": True, "calibrate": True, "plan none.json": False,
                "doctor --balancer 127.0.0.1:1": True, "top 127.0.0.1:1 --count 1": False}  # fmt: skip
    asked = json.dumps([command.split() for command in commands])
    done = subprocess.run([sys.executable, "-c", WITHOUT, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.partition("said\n")[2])
    for (command, needed), (code, text) in zip(commands.items(), said, strict=True):
        assert code in (1, 2), command
        assert (text.startswith("error: ") and "install" in text) == needed, (command, text)


def test_an_output_that_is_full_is_an_error_in_a_sentence(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["evenkeel", "plan", str(tables), "--topology", "h200x8", "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: standard output cannot be written: No space left on device; ")


def test_a_folder_of_kernels_that_cannot_be_written_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for name, wrong in (("file", True), ("folder", False)):
        monkeypatch.setenv("EVENKEEL_CACHE_DIR", str(tmp_path / name))
        done = run("warm-up")
        assert (f"EVENKEEL_CACHE_DIR is {tmp_path / name}, which cannot be written to" in done.stderr) == wrong
        assert (done.exit_code, "kernels ready" in done.stderr) == (0, True)
