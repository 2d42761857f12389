from pathlib import Path

import pytest

from services.balancer.settings import PREFIX, Settings, load_settings


def test_flags_go_before_environment_before_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "balancer.yaml"
    path.write_text("port: 1001\nworkers: 3\nmax_ranks: 77\nhost: 0.0.0.0\n")
    monkeypatch.setenv(f"{PREFIX}PORT", "1002")
    monkeypatch.setenv(f"{PREFIX}WORKERS", "2")
    settings = load_settings(["--config", str(path), "--port", "1003", "--reflection", "true"])
    assert (settings.port, settings.workers, settings.max_ranks) == (1003, 2, 77)
    assert settings.host == "0.0.0.0"
    assert settings.reflection
    assert settings.max_samples == Settings.model_fields["max_samples"].default
    assert settings.limits().max_ranks == 77


def test_the_file_may_be_toml_and_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "balancer.toml"
    path.write_text('grace_seconds = 7.5\nlog_level = "debug"\n')
    monkeypatch.setenv(f"{PREFIX}CONFIG", str(path))
    settings = load_settings([])
    assert settings.grace_seconds == 7.5
    assert settings.log_level == "debug"


def test_a_listening_address_is_local_unless_asked_otherwise() -> None:
    assert load_settings([]).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "named"), [("prot: 1\n", "prot"), ("port: 99999\n", "port"), ("max_ranks: 0\n", "max_ranks")]
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "balancer.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        load_settings(["--config", str(path)])


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.yaml"):
        load_settings([f"--config={tmp_path / 'absent.yaml'}"])
    other = tmp_path / "balancer.ini"
    other.write_text("")
    with pytest.raises(ValueError, match="must end in"):
        load_settings([f"--config={other}"])


def test_every_setting_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_a_misspelt_variable_ends_the_start_with_the_name_that_was_meant() -> None:
    with pytest.raises(ValueError, match=r"EVENKEEL_BALANCER_TOKEN_FIL is set.* EVENKEEL_BALANCER_TOKEN_FILE"):
        load_settings([], {f"{PREFIX}TOKEN_FIL": "/run/tokens.yml"})
    with pytest.raises(ValueError, match="--help"):
        load_settings([], {f"{PREFIX}XYZZY": "1"})
    assert load_settings([], {"EVENKEEL_BALANCER": "balancer:50051", "EVENKEEL_JOB": "a"}).port == 50051


def test_a_wrong_setting_is_named_as_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^EVENKEEL_BALANCER_PORT is 'abc': .*integer"):
        load_settings([], {f"{PREFIX}PORT": "abc"})
    with pytest.raises(ValueError, match=r"^--max-ranks is '0': .*greater than 0$"):
        load_settings(["--max-ranks", "0"], {f"{PREFIX}MAX_RANKS": "5"})
    path = tmp_path / "balancer.yaml"
    for text in ("max_ranks: [", "- 1", "1: 2"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^config .*balancer\.yaml"):
            load_settings([], {f"{PREFIX}CONFIG": str(path)})


LINKS = {
    f"{PREFIX}SERVICE_HOST": "10.0.0.9",
    f"{PREFIX}SERVICE_PORT": "50051",
    f"{PREFIX}SERVICE_PORT_GRPC": "50051",
    f"{PREFIX}PORT": "tcp://10.0.0.9:50051",
    f"{PREFIX}PORT_50051_TCP": "tcp://10.0.0.9:50051",
    f"{PREFIX}PORT_50051_TCP_PROTO": "tcp",
    f"{PREFIX}PORT_50051_TCP_PORT": "50051",
    f"{PREFIX}PORT_50051_TCP_ADDR": "10.0.0.9",
}


def test_what_kubernetes_makes_for_a_service_of_this_name_is_no_setting() -> None:
    settings = load_settings([], LINKS | {f"{PREFIX}MAX_RANKS": "7"})
    assert (settings.port, settings.max_ranks) == (50051, 7)
