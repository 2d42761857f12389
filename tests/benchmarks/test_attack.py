"""Attacks of each kind beside an honest job, a moment each, and SIGTERM while watches are held open."""

from __future__ import annotations

import time

import pytest

from benchmarks.attack import site

pytestmark = pytest.mark.timeout(400)  # compiles its kernels first, if nothing has yet

BY_NUMBER_CONTENT_AND_FRAMES = (
    "reset_streams",
    "distinct_rounds",
    "undecided_rounds",
    "lies_about_lengths",
    "long_headers",
)
ON_TLS = ("plaintext_to_tls", "wrong_chains", "renegotiation")


@pytest.mark.parametrize(("names", "secure"), [(BY_NUMBER_CONTENT_AND_FRAMES, False), (ON_TLS, True)])
def test_an_honest_job_misses_no_round_and_the_service_still_stops(names: tuple[str, ...], secure: bool) -> None:
    with site(seconds=0.4, pace=40.0, secure=secure) as opened:
        for name in names:
            result = opened.attack(name, 0.1)
            assert result.missed == 0, result
            assert result.rounds > 0, result
            assert not {"error", "unfinished"} & set(result.outcomes), result
        opened.begin("half_handshakes" if secure else "closed_watches")
        time.sleep(0.3)
        assert opened.stop_service()[1] == 0
