"""Keeps what goes wrong in tracing away from the step; needs no OpenTelemetry, unlike `evenkeel.tracing`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

logger = logging.getLogger(__name__)
P = ParamSpec("P")


def harmless(function: Callable[P, None]) -> Callable[P, None]:
    """A function whose errors are logged and go no further."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception:
            logger.warning("%s went wrong", function.__qualname__, exc_info=True)

    return guarded
