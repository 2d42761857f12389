"""Credentials of a rank; with a balancer that asks for them: `tests/faults`."""

from pathlib import Path

import pytest

from evenkeel.credentials import Credentials
from trainer_client import Balancer

TOKEN = "t" * 43


def test_from_env(tmp_path: Path) -> None:
    assert Credentials.from_env({}) == Credentials()
    assert not Credentials.from_env({"EVENKEEL_TLS": "0"}).secure
    assert Credentials.from_env({"EVENKEEL_TLS": "1"}).secure
    named = Credentials.from_env({"EVENKEEL_TLS_CA": "/ca.pem", "EVENKEEL_TOKEN_FILE": " /token "})
    assert named == Credentials(ca=Path("/ca.pem"), token_file=Path("/token"))
    with pytest.raises(ValueError, match="EVENKEEL_TLS is 'maybe'"):
        Credentials.from_env({"EVENKEEL_TLS": "maybe"})
    with pytest.raises(ValueError, match="certificate is set and key is not"):
        Credentials.from_env({"EVENKEEL_TLS_CERTIFICATE": "/c.pem"})


@pytest.mark.parametrize("content", ["", "two words", "x" * 600, "é", f"{TOKEN}\n{TOKEN}"])
def test_files_that_hold_no_token(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ValueError, match="does not hold one token") as caught:
        Credentials(token_file=file).check("127.0.0.1:1")
    assert TOKEN not in str(caught.value)


def test_a_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    credentials = Credentials(token_file=file)
    with pytest.raises(ValueError, match=r"balancer:50051 would send the token in the clear: set tls or ca"):
        Balancer.connect("balancer:50051", job="j", credentials=credentials)
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert credentials.metadata(address) == (("authorization", f"Bearer {TOKEN}"),)
    secure = Credentials(tls=True, token_file=file)
    assert secure.metadata("balancer:50051") == (("authorization", f"Bearer {TOKEN}"),)
    assert TOKEN not in repr(secure)
    with pytest.raises(ValueError, match=r"ca .*none.pem cannot be read"):
        Balancer.connect("balancer:50051", job="j", credentials=Credentials(ca=tmp_path / "none.pem"))
