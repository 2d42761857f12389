"""Notes which functions of the project a program calls, in the order of their first calls, in all its threads.

`python -m tests.docs.traced ARGUMENTS…` runs the module that `TRACED_MODULE` names with these arguments, and writes the
names into the file that `TRACED_FILE` names when it ends.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("evenkeel.", "services.", "trainer_client.")


@contextmanager
def traced() -> Iterator[dict[str, None]]:
    """The names, as `module:function`, of what is called within the block, and by threads that begin in it."""
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(PACKAGES):
            called.setdefault(f"{module}:{frame.f_code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def main() -> None:
    """Runs the module."""
    module = os.environ["TRACED_MODULE"]
    sys.argv[0] = module
    with traced() as called:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            Path(os.environ["TRACED_FILE"]).write_text("\n".join(called))


if __name__ == "__main__":
    main()
