"""Structured logs: for people on a terminal, JSON lines otherwise."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

from services.operations.lines import Sparing


def configure_logs(level: str, style: str, stream: TextIO | None = None) -> None:
    """Sends structlog, the standard library's loggers and Python's warnings to stderr.

    Args:
        level: debug, info, warning or error.
        style: console, json, or auto (console on a terminal).
        stream: where to instead; `BackgroundWriter` lets nobody wait for it.
    """
    stream = sys.stderr if stream is None else stream
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
