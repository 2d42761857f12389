"""What starting either service has in common: settings, logs, exit codes, and the file that tells its port."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from services.operations.settings import AnySettings
from services.security.rates import Bucket, Buckets

log = structlog.get_logger(__name__)


def run_service(
    load: Callable[[Sequence[str]], AnySettings],
    serve: Callable[[AnySettings], Coroutine[Any, Any, int]],
    arguments: Sequence[str],
) -> int:
    """Runs a service from its command line to its end.

    Args:
        load: From the command line to settings.
        serve: Runs the service until it is asked to stop; returns the exit code.
        arguments: The command line without the program's name.

    Returns:
        The exit code: 0 after a clean stop, 2 for wrong settings, 1 when a port cannot be had.
    """
    faulthandler.enable()  # a crash of native code says where it was
    try:
        settings = load(arguments)
        configure_logs(settings.log_level, settings.log_format)
        return asyncio.run(serve(settings))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


def write_port(path: Path | None, port: int | None) -> None:
    """Writes a bound port, so that a reader sees all of it or nothing; does nothing without a file or port."""
    if path is None or port is None:
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(f"{port}\n")
        part.replace(path)
    except OSError as error:
        raise OSError(f"the port cannot be written to {path}: {error.strerror}") from None


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Stops on SIGTERM and SIGINT, and on SIGHUP where that says that the terminal is gone.

    Elsewhere SIGHUP changes nothing: operators send it to have files read again, which needs no signal here.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        followed = "certificates and tokens are followed by themselves; other settings need a restart"
        tell = partial(log.info, "SIGHUP changes nothing", remedy=followed)
        loop.add_signal_handler(signal.SIGHUP, stop if sys.stdin is not None and sys.stdin.isatty() else tell)


def configure_logs(level: str, style: str) -> None:
    """Sends structlog, the standard library's loggers and Python's warnings to stderr.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        style: `console`, `json`, or `auto` (the first on a terminal).
    """
    stream = sys.stderr
    console = style == "console" or (style == "auto" and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        Sparing(),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Tracebacks without the values of local variables: those may be secrets.
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.captureWarnings(True)


class Sparing:
    """Drops lines about a caller (those with `caller`) of which there are too many; the next one tells how many."""

    def __init__(
        self, *, rate: float = 1.0, burst: float = 20.0, rate_of_all: float = 20.0, burst_of_all: float = 500.0
    ):
        """Makes a processor of structlog.

        Args:
            rate: Lines a second with the same event and caller.
            burst: The same at once.
            rate_of_all: Lines a second about callers.
            burst_of_all: The same at once.
        """
        self._buckets = Buckets(rate=rate, burst=burst, most=1024)
        self._all = Bucket.full(rate=rate_of_all, burst=burst_of_all, now=time.monotonic())
        self._left_out = 0
        self._lock = threading.Lock()

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """Lets an event pass, or drops it."""
        caller = event.get("caller")
        if caller is None:
            return event
        now = time.monotonic()
        with self._lock:
            if not self._buckets.try_take(f"{event.get('event')} {caller}", now) or not self._all.try_take(now):
                self._left_out += 1
                raise structlog.DropEvent
            left_out, self._left_out = self._left_out, 0
        return {**event, "left_out": left_out} if left_out else event
