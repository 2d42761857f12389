"""`evenkeel warm-up` where it cannot write to the folder that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_client.cli.warm_up import unusable_folder


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVENKEEL_CACHE_DIR", str(tmp_path / "file"))
    assert f"EVENKEEL_CACHE_DIR is {tmp_path / 'file'}" in unusable_folder()
    monkeypatch.setenv("EVENKEEL_CACHE_DIR", str(tmp_path / "folder"))
    assert unusable_folder() == ""
    monkeypatch.delenv("EVENKEEL_CACHE_DIR")
    assert unusable_folder() == ""
