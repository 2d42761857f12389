"""Open pages: each view is rendered once for all, and who does not read costs nobody anything."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from services.balancer.feed import Feed, View

SECONDS = 60.0


@pytest.fixture
def feed() -> Iterator[Feed]:
    found = Feed()
    yield found
    found.close()


class Reader:
    """The far end of a page's connection."""

    def __init__(self, feed: Feed, view: View, may_go_on: Any = lambda: True) -> None:
        self.end, ours = socket.socketpair()
        self.end.settimeout(SECONDS)
        self.text = b""
        feed.add(ours, view, may_go_on)

    def event(self) -> Any:
        """The next event's document; None at the end."""
        while b"\n\n" not in self.text:
            data = self.end.recv(1 << 16)
            if not data:
                return None
            self.text += data
        event, self.text = self.text.split(b"\n\n", 1)
        return json.loads(event.split(b"data: ")[1])


class Counter:
    """A view that counts how often it is rendered."""

    def __init__(self, size: int = 10) -> None:
        self.rendered = 0
        self.rounds = 0
        self.size = size

    def view(self, key: str = "all") -> View:
        return View(key, self.render)

    def render(self, since: int) -> tuple[dict[str, Any], int]:
        self.rendered += 1
        self.rounds += 1
        return {"since": since, "text": "x" * self.size}, self.rounds


def until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_view_is_rendered_once_for_all_pages(feed: Feed) -> None:
    counter = Counter()
    readers = [Reader(feed, counter.view()) for _ in range(50)]
    for reader in readers:
        assert reader.event()["since"] == 0
    for reader in readers:
        assert reader.event()["since"] > 0
    assert counter.rendered < 50  # of a hundred events


def test_nothing_is_rendered_for_nobody(feed: Feed) -> None:
    counter = Counter()
    reader = Reader(feed, counter.view())
    assert reader.event() is not None
    reader.end.close()
    until(lambda: len(feed) == 0)
    rendered = counter.rendered
    time.sleep(1.5)  # a tick that does not come
    assert counter.rendered == rendered


def test_who_does_not_read_skips_and_gets_all_of_it_later(feed: Feed) -> None:
    large, small = Counter(4 << 20), Counter()
    slow, quick = Reader(feed, large.view("large")), Reader(feed, small.view("small"))
    for _ in range(3):
        assert quick.event() is not None  # goes on while the other's connection is full
    assert large.rendered <= 2  # what it has no room for is not made
    documents = [slow.event() for _ in range(2)]
    assert [one["since"] for one in documents] == [0, 0]  # it has missed some, so it begins anew


def test_a_page_that_may_not_go_on_is_ended(feed: Feed) -> None:
    allowed = threading.Event()
    allowed.set()
    counter = Counter()
    reader = Reader(feed, counter.view(), allowed.is_set)
    assert reader.event() is not None
    allowed.clear()
    while reader.event() is not None:
        pass
    until(lambda: len(feed) == 0)


def test_what_is_over_ends_its_pages_and_an_error_those_of_nobody_else(feed: Feed) -> None:
    counter = Counter()

    def fails(_since: int) -> tuple[dict[str, Any], int]:
        raise ZeroDivisionError

    gone, broken = Reader(feed, View("gone", lambda _since: None)), Reader(feed, View("broken", fails))
    assert gone.event() is None
    assert broken.event() is None
    good = Reader(feed, counter.view())
    assert good.event() is not None
    assert good.event() is not None


def test_a_costly_view_is_rendered_rarely(feed: Feed) -> None:
    """A hundredth of the time at most: what takes 0.03 s comes every 3 s."""
    times: list[float] = []

    def render(_since: int) -> tuple[dict[str, Any], int]:
        times.append(time.monotonic())
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        return {}, 0

    reader = Reader(feed, View("costly", render))
    assert reader.event() is not None
    until(lambda: len(times) >= 2)
    assert times[1] - times[0] >= 2.5
