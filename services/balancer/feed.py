"""Events for open pages: one thread renders each view once a tick and writes it to all who look at it.

Nobody can make it expensive. A view is rendered once however many look at it, and never for nobody; who reads slowly
skips what it has no room for; and ticks are so far apart that rendering takes at most a hundredth of the time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.balancer.views import as_json

log = structlog.get_logger(__name__)

MOST_PAGES = 256
"""Open pages at a time."""

_TICK_SECONDS = 1.0
_SHARE_OF_TIME = 0.01
_LONGEST_TICK = 30.0
_STALLED_SECONDS = 60.0
_SEND_BUFFER_BYTES = 1 << 18  # what the kernel holds for who does not read
_GATHER_SECONDS = 0.05  # in which more pages may come that are told together


@dataclass(frozen=True, slots=True)
class View:
    """What a page looks at.

    Attributes:
        key: Equal for pages that see the same.
        render: From the number of rounds that pages have already to the document, and how many rounds it knows of;
            None: it is over.
    """

    key: Hashable
    render: Callable[[int], tuple[dict[str, Any], int] | None] = field(compare=False)


@dataclass(slots=True, eq=False)
class _Page:
    connection: socket.socket
    view: View
    may_go_on: Callable[[], bool]
    pending: memoryview = field(default_factory=lambda: memoryview(b""))
    is_new: bool = True
    moved_at: float = 0.0


def event(name: str, document: dict[str, Any]) -> bytes:
    """An event of a stream of server-sent events."""
    return f"event: {name}\ndata: {as_json(document)}\n\n".encode()


class Feed:
    """Writes to open pages what they look at, until they are closed.

    Attributes:
        ticks: How often something was rendered.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self._pages: list[_Page] = []
        self._known: dict[Hashable, int] = {}
        self._arrived = threading.Condition()
        self._closed = self._has_new = False
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """Whether there may be no more pages."""
        return len(self._pages) >= MOST_PAGES

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, connection: socket.socket, view: View, may_go_on: Callable[[], bool]) -> None:
        """Takes a page on; from any thread.

        Args:
            connection: The answer's header has been written to it.
            view: What it looks at.
            may_go_on: Asked at each tick whether it may still see it.
        """
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        page = _Page(connection, view, may_go_on, moved_at=time.monotonic())
        with self._arrived:
            if self._closed:
                connection.close()
                return
            self._pages.append(page)
            self._has_new = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pages", daemon=True)
                self._thread.start()
            self._arrived.notify()

    def close(self) -> None:
        """Ends all pages' connections."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        if self._thread is not None:
            self._thread.join(5)
        for page in self._pages:
            page.connection.close()

    # ------------------------------------------------------------------ inside

    def _run(self) -> None:
        due, spent = 0.0, 0.0
        while self._wait(due):
            began, used = time.monotonic(), time.thread_time()
            is_due = began >= due
            with self._arrived:
                self._has_new = False
                pages = list(self._pages) if is_due else [page for page in self._pages if page.is_new]
            self._tick(pages, began, is_due=is_due)
            spent += time.thread_time() - used
            if is_due:
                due, spent = began + min(_LONGEST_TICK, max(_TICK_SECONDS, spent / _SHARE_OF_TIME)), 0.0

    def _wait(self, due: float) -> bool:
        """Until the next tick is due, or a page has come; False at the end."""
        with self._arrived:
            if not self._pages:
                self._known.clear()
            self._arrived.wait_for(lambda: self._closed or self._pages)
            self._arrived.wait_for(lambda: self._closed or self._has_new, max(0.0, due - time.monotonic()))
            has_new = self._has_new
        if has_new:
            time.sleep(_GATHER_SECONDS)
        return not self._closed

    def _tick(self, pages: list[_Page], now: float, *, is_due: bool) -> None:
        whole: dict[Hashable, bytes | None] = {}
        latest: dict[Hashable, bytes | None] = {}
        gone = set[int]()
        since = self._known
        if is_due:
            self._known = {}
        for page in pages:
            key = page.view.key
            try:
                if not (page.may_go_on() and self._drained(page, now)):
                    gone.add(id(page))
                    continue
                if page.pending:
                    page.is_new = True  # it lacks what it skips: it gets all of it, once it has read
                    continue
                found = whole if page.is_new else latest
                if key not in found:
                    found[key] = self._render(page.view, 0 if page.is_new else since.get(key, 0))
                message = found[key]
                if message is None:
                    gone.add(id(page))
                    continue
                page.is_new = False
                page.pending, page.moved_at = memoryview(message), now
                self._drained(page, now)
            except OSError:
                gone.add(id(page))
            except Exception:  # what cannot be rendered ends its own pages
                log.exception("a page cannot be told", view=str(key))
                gone.add(id(page))
        if gone:
            with self._arrived:
                self._pages = [page for page in self._pages if id(page) not in gone]
            for page in pages:
                if id(page) in gone:
                    with contextlib.suppress(OSError):
                        page.connection.close()

    def _render(self, view: View, since: int) -> bytes | None:
        self.ticks += 1
        rendered = view.render(since)
        if rendered is None:
            return None
        document, known = rendered
        # Pages that know more than others are told some rounds twice.
        self._known[view.key] = min(known, self._known.get(view.key, known))
        return event("session" if "session" in document else "sessions", document)

    def _drained(self, page: _Page, now: float) -> bool:
        """Writes what fits; False for who has not read for a long time."""
        while page.pending:
            try:
                sent = page.connection.send(page.pending)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return now - page.moved_at < _STALLED_SECONDS
            page.pending, page.moved_at = page.pending[sent:], now
        return True
