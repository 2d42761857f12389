import pytest

from trainer_client.balancing.opening import check_versions, name_session


def test_ranks_of_other_versions_are_named() -> None:
    check_versions(["1.0, votes of 148 bytes"] * 3)
    with pytest.raises(
        ValueError, match=r"rank 2 runs evenkeel an older one, rank 0 runs 1.0, .* the same version on all"
    ):
        check_versions(["1.0, votes of 148 bytes", "1.0, votes of 148 bytes", "an older one"])


def test_the_launcher_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    name = name_session("launched", "g", "train")
    assert (name.run_id, name.restart_count) == ("run-7", 2)


def test_a_stream_opened_again_is_another_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-7")
    ids = {name_session("again", "g", "train").run_id for _ in range(3)}
    assert len(ids) == 3
    assert name_session("again", "g", "eval").run_id == "run-7"


def test_without_a_launcher_every_run_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(variable, raising=False)
    assert name_session("a", "g", "train").run_id != name_session("b", "g", "train").run_id


def test_an_agent_without_a_run_id_names_the_run_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert name_session("c", "g", "train").run_id == name_session("d", "g", "train").run_id
