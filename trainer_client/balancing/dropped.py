"""Streams that were dropped without being closed: they close by themselves, and before their successor opens."""

from __future__ import annotations

import _thread
import gc
import logging
import os
import sys
import threading
import time
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)

Key = tuple[str, str, str]


class Stream(Protocol):
    """What can be dropped."""

    @property
    def key(self) -> Key:
        """Job, group and loader."""

    def close(self) -> None:
        """Leaves the session and ends the threads, within a bounded time."""


_open: weakref.WeakSet[Stream] = weakref.WeakSet()
_closing: dict[int, tuple[Key, threading.Event]] = {}


def note_open(stream: Stream) -> None:
    """Notes a stream that is open from now on."""
    _open.add(stream)


def note_closed(stream: Stream) -> None:
    """Notes that it is no longer."""
    _open.discard(stream)


def drop(stream: Stream, opened_by: int) -> None:
    """Closes an open stream that nobody refers to any more, in the background: closing waits for other ranks.

    Called from wherever the stream is collected, so it takes no locks.

    Args:
        stream: The stream.
        opened_by: The process that opened it; a child of it leaves it alone.
    """
    if os.getpid() != opened_by or sys.is_finalizing():
        return
    done = threading.Event()
    _closing[id(done)] = (stream.key, done)
    try:
        _thread.start_new_thread(_close, (stream, done))
    except RuntimeError:  # no thread to be had
        _closing.pop(id(done), None)


def await_predecessors(stream: Stream, seconds: float) -> None:
    """Waits until dropped streams of the same name have left the session and their process groups.

    Args:
        stream: The one that is about to open.
        seconds: How long at most.
    """
    if any(other is not stream and other.key == stream.key for other in list(_open)):
        gc.collect()  # what is dropped may be part of a cycle
    until = time.monotonic() + seconds
    for key, done in list(_closing.values()):
        if key == stream.key:
            done.wait(max(0.0, until - time.monotonic()))


def _close(stream: Stream, done: threading.Event) -> None:
    try:
        stream.close()
    except Exception as error:  # nobody is there to be told
        logger.debug("a dropped stream of %s: %s", stream.key, error)
    finally:
        _closing.pop(id(done), None)
        done.set()
