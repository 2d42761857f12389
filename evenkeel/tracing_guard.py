"""Keeps what goes wrong in tracing away from the step; needs no OpenTelemetry, unlike `evenkeel.tracing`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

logger = logging.getLogger(__name__)
P = ParamSpec("P")


def harmless(make: Callable[P, None]) -> Callable[P, None]:
    """What goes wrong in `make` is logged and goes no further."""

    @wraps(make)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            make(*args, **kwargs)
        except Exception:
            logger.warning("%s went wrong", make.__qualname__, exc_info=True)

    return guarded
