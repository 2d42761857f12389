"""Every error as a problem document (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from evenkeel.placement import InvalidInputError
from evenkeel.placement.fields import TimeIsUpError, encode

MEDIA_TYPE = "application/problem+json"
_SHOWN = 80

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """What is wrong with one field.

    Attributes:
        field: Path of the field, such as `tables[0].rows`.
        value: The value as given, shortened.
        problem: What is wrong with it.
        remedy: What to give instead.
    """

    field: str
    value: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDocument:
    """What an error answers.

    Attributes:
        type: What kind of problem it is, such as `urn:evenkeel:problem:invalid-input`.
        title: The kind of problem in words.
        status: The HTTP status.
        detail: What happened, and what to do.
        instance: The path that was asked for.
        errors: The fields that are wrong, if any.
    """

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: tuple[FieldProblem, ...] = ()


class ServiceError(Exception):
    """A problem that the service answers."""

    def __init__(
        self, status: int, title: str, detail: str | InvalidInputError, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Describes it, in words or by the value that is wrong."""
        super().__init__(str(detail))
        self.status, self.title, self.detail, self.headers = status, title, detail, dict(headers or {})

    def response(self, path: str) -> Response:
        """The problem document, as the answer to a request for a path."""
        detail, errors = self.detail, tuple[FieldProblem, ...]()
        if isinstance(detail, InvalidInputError):
            field, value = _shown(detail.field), _shown(detail.value)
            errors = (FieldProblem(field=field, value=value, problem=detail.problem, remedy=detail.remedy),)
            detail = f"{field}: {detail.problem} (got {value}); {detail.remedy}"
        document = ProblemDocument(
            type=f"urn:evenkeel:problem:{self.title.lower().replace(' ', '-')}",
            title=self.title,
            status=self.status,
            detail=_encodable(detail),
            instance=_encodable(path),
            errors=errors,
        )
        return JSONResponse(encode(document), self.status, self.headers, media_type=MEDIA_TYPE)


def client_gone() -> ServiceError:
    """What is answered where nobody reads it any more."""
    return ServiceError(499, "Client gone", "the client closed the connection before the answer")


def time_is_up(wrong: InvalidInputError) -> ServiceError:
    """What is answered where the limit is over before there is a plan; elsewhere, or later, it may do."""
    return ServiceError(503, "Time limit", wrong, headers={"Retry-After": "1"})


async def answer_problem(request: Request, error: Exception) -> Response:
    """The problem document of any error."""
    path = request.url.path
    if isinstance(error, TimeIsUpError):
        error = time_is_up(error)
    elif isinstance(error, InvalidInputError):
        error = ServiceError(422, "Invalid input", error)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        known = ", ".join(sorted(route.path for route in request.app.routes))
        error = ServiceError(404, "Not found", InvalidInputError("path", path, "is no address here", f"use {known}"))
    elif isinstance(error, HTTPException):  # of which Starlette has one more
        allowed = (error.headers or {}).get("Allow", "another one")
        wrong = InvalidInputError("method", request.method, "is not for this address", f"use {allowed}")
        error = ServiceError(error.status_code, "Method not allowed", wrong, headers=error.headers)
    elif not isinstance(error, ServiceError):
        log.error("request_failed", path=path, error=repr(error))
        error = ServiceError(500, "Internal error", "the service failed; its log tells why")
    return error.response(path)


def _shown(value: object) -> str:
    try:
        text = value if value and isinstance(value, str) else json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value))
    text = _encodable(text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _encodable(text: str) -> str:
    """The text without halves of characters, which JSON can name and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
