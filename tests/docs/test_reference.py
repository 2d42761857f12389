"""What is written from code is as the code would have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import zygote

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("writer", ["scripts.write_reference", "scripts.draw_pictures"])
def test_files_are_what_their_writer_writes(writer: str) -> None:
    done = zygote.run(writer, "--check", timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
