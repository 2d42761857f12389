"""What importing the packages does to the process that imports them: nothing."""

import subprocess
import sys

IMPORT_ALL = """
import importlib, os, pkgutil, signal, sys
import trainer_client.attention
assert "torch._dynamo" not in sys.modules, "the compiler takes seconds"
sys.modules["grpc"] = None
import trainer_client.embedding.checkpoint, trainer_client.cli.calibrate
del sys.modules["grpc"]
import torch._dynamo  # sets a variable for its own cache
before = dict(os.environ)
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
import evenkeel, services, trainer_client
PROGRAMS = "__main__", "recsys_examples.everywhere"  # the second is imported to change what its peer has registered
for package in (evenkeel, services, trainer_client):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(PROGRAMS):
            importlib.import_module(module.name)
            changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
            assert dict(os.environ) == before, (module.name, changed)
assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
print("unchanged")
"""


def test_no_import_changes_the_process() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=110)
    assert ran.stdout == "unchanged\n", ran.stderr
