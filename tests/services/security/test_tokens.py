"""The token file, its rotation, and the rates."""

import io
import os
import stat
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.security import issue
from services.security.rates import Bucket, Buckets
from services.security.tokens import AuthenticationError, TokenStore, hash_token, read_tokens


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.time + timedelta(seconds=self.seconds)


def draw(path: Path, name: str, *flags: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        assert issue.main([name, "--file", str(path), *flags]) == 0
    return output.getvalue().strip()


def test_issued_tokens_hold_for_their_jobs(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yml"
    first = draw(path, "team-a", "--job", "a-*", "--job", "shared")
    second = draw(path, "team-b", "--job", "b-?", "--service", "balancer", "--days", "1")
    assert first != second
    assert len(first) >= 43  # 256 bits
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first not in path.read_text()
    store = TokenStore(path)
    one = store.authenticate(f"Bearer {first}", "balancer")
    assert one.name == "team-a"
    assert [one.allows(job) for job in ("a-1", "shared", "b-1", "A-1", "xa-1")] == [True, True, False, False, False]
    two = store.authenticate(f"bearer {second}", "balancer")
    assert [two.allows(job) for job in ("b-1", "b-12")] == [True, False]
    with pytest.raises(AuthenticationError, match="for balancer, not for the planner"):
        store.authenticate(f"Bearer {second}", "planner")


def test_issue_keeps_who_may_read_the_file(tmp_path: Path) -> None:
    path, mine = tmp_path / "secrets" / "tokens.yml", tmp_path / "team-a.token"
    assert draw(path, "first", "--out", str(mine)) == ""
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    assert TokenStore(path).authenticate(f"Bearer {mine.read_text().strip()}", "balancer").name == "first"
    path.chmod(0o440)
    owner = (path.stat().st_uid, path.stat().st_gid)
    if os.geteuid() == 0:
        owner = (65532, 65532)
        os.chown(path, *owner)
    draw(path, "second")
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o440)
    assert {identity.name for _, identity in read_tokens(path)} == {"first", "second"}


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "tokens.yml", tmp_path / "team.token"
    draw(path, "team")
    before = path.read_text()
    (tmp_path / "plain").write_text("")
    for arguments, message in (
        (["team", "--file", str(path)], "has a token named 'team'; --rotate DAYS replaces it"),
        (["other", "--file", str(path), "--rotate", "1"], "has no token named 'other' to replace"),
        (["other", "--rotate", "1"], "name it with --file"),
        (["other", "--file", str(path), "--days", "-1"], "--days is -1"),
        (["other", "--file", str(tmp_path / "plain" / "tokens.yml")], "cannot be written"),
        (["other", "--file", str(path), "--out", str(path)], "is there already"),
    ):
        flags = [] if "--out" in arguments else ["--out", str(out)]
        assert issue.main([*arguments, *flags]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
        assert path.read_text() == before


def test_a_token_is_replaced_under_its_name_while_both_hold(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens.yml", Clock()
    old = draw(path, "team", "--job", "a-*", "--service", "balancer")
    draw(path, "other", "--job", "b")
    clock.time = datetime.now(UTC)
    new = draw(path, "team", "--rotate", "7")
    store = TokenStore(path, clock=clock, now=clock.now)
    for token in (old, new):
        found = store.authenticate(f"Bearer {token}", "balancer")
        assert (found.name, found.allows("a-1"), found.services) == ("team", True, ("balancer",))
    clock.seconds = 7 * 86400 + 60
    assert store.authenticate(f"Bearer {new}", "balancer").name == "team"
    with pytest.raises(AuthenticationError, match="token 'team' expired"):
        store.authenticate(f"Bearer {old}", "balancer")
    third = draw(path, "team", "--rotate", "0")  # at once: the second one ends, the first one's end is not put off
    names = [identity.name for _, identity in read_tokens(path)]
    assert names == ["team", "other", "team", "team"]
    store = TokenStore(path)
    with pytest.raises(AuthenticationError, match="expired"):
        store.authenticate(f"Bearer {new}", "balancer")
    assert store.authenticate(f"Bearer {third}", "balancer").allows("a-2")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "abc", "Bearer " + "x" * 600, "Bearer \ud800", "Bearer é"]
)
def test_headers_that_are_none(tmp_path: Path, header: str | None) -> None:
    path = tmp_path / "tokens.yml"
    token = draw(path, "team")
    with pytest.raises(AuthenticationError) as caught:
        TokenStore(path).authenticate(header, "balancer")
    assert token not in str(caught.value)


def test_expiry_and_rotation(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens.yml", Clock()
    entry = {"name": "old", "sha256": hash_token("o" * 40), "jobs": ["*"], "expires": "2026-01-01T00:01:00+00:00"}
    path.write_text(yaml.safe_dump({"tokens": [entry]}))
    store = TokenStore(path, clock=clock, now=clock.now)
    assert store.authenticate("Bearer " + "o" * 40, "balancer").name == "old"
    clock.seconds = 59.9
    store.authenticate("Bearer " + "o" * 40, "balancer")
    clock.seconds = 60.0
    with pytest.raises(AuthenticationError, match="token 'old' expired at 2026-01-01T00:01:00"):
        store.authenticate("Bearer " + "o" * 40, "balancer")
    path.write_text(yaml.safe_dump({"tokens": [{"name": "new", "sha256": hash_token("n" * 40)}]}))
    clock.seconds = 62.0
    assert store.authenticate("Bearer " + "n" * 40, "planner").name == "new"
    with pytest.raises(AuthenticationError, match="unknown token"):
        store.authenticate("Bearer " + "o" * 40, "balancer")
    for damaged in ("tokens: {", "[]", "tokens: [{name: x}]", "\xff"):
        path.write_text(damaged, encoding="latin-1")
        clock.seconds += 2
        assert store.authenticate("Bearer " + "n" * 40, "planner").name == "new"
    path.unlink()
    clock.seconds += 2
    assert store.authenticate("Bearer " + "n" * 40, "planner").name == "new"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"sha256": "0" * 64}, "name is missing"),
        ({"name": "a", "sha256": "my-token"}, "sha256 must be 64 lower-case hexadecimal digits"),
        ({"name": "a", "sha256": "0" * 64, "job": "x"}, "unknown keys: job"),
        ({"name": "a", "sha256": "0" * 64, "jobs": "x"}, "jobs must be a list"),
        ({"name": "a", "sha256": "0" * 64, "services": ["trainer"]}, "services holds 'trainer'"),
        ({"name": "a", "sha256": "0" * 64, "expires": "soon"}, "expires is 'soon'"),
        ("token", "is no mapping"),
    ],
)
def test_wrong_entries_are_named(tmp_path: Path, entry: object, message: str) -> None:
    path = tmp_path / "tokens.yml"
    path.write_text(yaml.safe_dump({"tokens": [entry]}))
    with pytest.raises(ValueError, match=f"entry 0.*{message}") as caught:
        read_tokens(path)
    assert "my-token" not in str(caught.value)
    path.write_text(yaml.safe_dump({"tokens": [{"name": name, "sha256": "0" * 64} for name in "ab"]}))
    with pytest.raises(ValueError, match="two entries have the same sha256"):
        read_tokens(path)


@given(rate=st.floats(0.1, 1000), burst=st.floats(1, 100), steps=st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_no_more_than_rate_and_burst(rate: float, burst: float, steps: list[float]) -> None:
    bucket, now, granted = Bucket.full(rate=rate, burst=burst, now=0.0), 0.0, 0
    for step in steps:
        now += step
        granted += bucket.try_take(now)
        assert granted <= burst + rate * now + 1e-6


def test_callers_are_bounded() -> None:
    buckets = Buckets(rate=1, burst=2, most=10)
    assert [buckets.try_take("a", 0.0) for _ in range(3)] == [True, True, False]
    for number in range(1000):
        assert buckets.try_take(str(number), 0.0)
    assert len(buckets) == 10
