"""`evenkeel warm-up` where it cannot write what it was told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenkeel.partitioning import KERNELS
from evenkeel.partitioning.kernel_cache import KernelFolder
from trainer_client.cli.warm_up import passed_over_folder


def test_a_folder_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "file"
    told.touch()
    for name, said in (("file", f"EVENKEEL_CACHE_DIR is {told}, which cannot be written to"), ("folder", "")):
        monkeypatch.setenv("EVENKEEL_CACHE_DIR", str(tmp_path / name))
        assert passed_over_folder(KernelFolder(KERNELS.sources)).startswith(said)
    assert passed_over_folder(KernelFolder(KERNELS.sources)) == ""
    monkeypatch.delenv("EVENKEEL_CACHE_DIR")
    assert passed_over_folder(KernelFolder(KERNELS.sources)) == ""
