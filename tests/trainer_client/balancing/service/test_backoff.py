"""How soon a stream is opened again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from trainer_client.balancing.service.outages import Backoff, Cause
from trainer_client.balancing.service.uplink import Uplink

from benchmarks.harness.balancer_process import running_balancer
from evenkeel.protocol import balancer_pb2 as pb
from tests.services.balancer.samples import join_message


@pytest.mark.parametrize(("num_streams", "longest"), [(1, 0.5), (64, 0.5), (512, 2.56), (4096, 5.0)])
def test_pauses_double_up_to_what_the_streams_of_a_job_may_do_together(num_streams: int, longest: float) -> None:
    backoff = Backoff(num_streams)
    expected = 0.1
    for _ in range(12):
        assert 0.5 * expected <= backoff.after(joined=False, refused=False) <= 1.5 * expected
        expected = min(2 * expected, longest)
    assert 0.05 <= backoff.after(joined=True, refused=False) <= 0.15
    assert 0.0 <= backoff.encouraged() <= num_streams / 2000
    assert backoff.after(joined=False, refused=False) <= 0.15  # soon again, should that have come too early


def test_a_service_that_says_no_is_left_alone_for_longer() -> None:
    backoff = Backoff(1)
    pauses = [backoff.after(joined=False, refused=True) for _ in range(12)]
    assert 2.5 <= pauses[-1] <= 7.5


class Heard:
    """Notes what an uplink tells."""

    def __init__(self) -> None:
        self.has_joined = threading.Event()
        self.has_lost = threading.Event()
        self.cause: Cause | None = None

    def answered(self, answers: Sequence[pb.Answer]) -> None:
        raise AssertionError(answers)

    def joined(self, epoch: int) -> None:
        self.has_joined.set()

    def lost(self, trouble: str) -> None:
        self.has_lost.set()

    def noted(self, trouble: str, cause: Cause | None = None) -> None:
        self.cause = cause


def test_a_stream_that_hears_of_anothers_success_does_not_sit_out_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "after", lambda self, **_: 3600.0)
    with running_balancer() as balancer:
        balancer.kill()
        heard = Heard()
        uplink = Uplink(balancer.address, join_message(0, world_size=1), heard, join_timeout=60.0)
        uplink.start()
        assert heard.has_lost.wait(30)
        balancer.start()
        assert not uplink.ready
        uplink.encourage()
        assert heard.has_joined.wait(60)
        assert uplink.ready
        uplink.close()


def test_what_a_later_attempt_has_replaced_never_takes_its_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "after", lambda self, **_: 0.01)
    with running_balancer() as balancer:
        first, second = [
            (heard := Heard(), Uplink(balancer.address, join_message(0, world_size=1, restart_count=count), heard,
                                      join_timeout=60.0))
            for count in (3, 4)
        ]  # fmt: skip
        for heard, uplink in (first, second):
            uplink.start()
            assert heard.has_joined.wait(60)
        assert first[0].has_lost.wait(60)
        deadline = time.monotonic() + 60
        while sum(thread.name == "evenkeel-connection" for thread in threading.enumerate()) > 1:
            assert time.monotonic() < deadline, "the first tries again and again"
            time.sleep(0.01)
        assert first[0].cause is not None
        assert str(first[0].cause).startswith("superseded: restart_count is 3, and restart 4 of ")
        assert second[1].ready
        for _, uplink in (first, second):
            uplink.close()
