"""Every error as a problem document (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from evenkeel.placement import InvalidInputError
from evenkeel.placement.fields import encode

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
        self,
        status: int,
        title: str,
        detail: str | InvalidInputError,
        *,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Describes it, in words or by the value that is wrong."""
        super().__init__(str(detail))
        self.status, self.title, self.detail, self.headers = status, title, detail, dict(headers or {})
        self.kind = kind or title.lower().replace(" ", "-")

    def response(self, path: str) -> Response:
        """The problem document, as the answer to a request for a path."""
        detail, errors = self.detail, tuple[FieldProblem, ...]()
        if isinstance(detail, InvalidInputError):
            field, value = _encodable(detail.field), _shown(detail.value)
            errors = (FieldProblem(field=field, value=value, problem=detail.problem, remedy=detail.remedy),)
            detail = f"{field}: {detail.problem} (got {value}); {detail.remedy}"
        document = ProblemDocument(
            type=f"urn:evenkeel:problem:{self.kind}",
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


async def answer_problem(request: Request, error: Exception) -> Response:
    """The problem document of any error."""
    return _problem(request, error).response(request.url.path)


def _problem(request: Request, error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, InvalidInputError):
        return ServiceError(422, "Invalid input", error)
    if not isinstance(error, HTTPException):
        log.error("request_failed", path=request.url.path, error=repr(error))
        return ServiceError(500, "Internal error", "the service failed; its log tells why", kind="internal")
    detail: str | InvalidInputError = str(error.detail)
    kind, title = "http", "Request refused"
    if error.status_code == 404:
        kind, title, known = "not-found", "Not found", ", ".join(sorted(request.app.openapi()["paths"]))
        detail = InvalidInputError("path", request.url.path, "is no address here", f"use one of: {known}")
    elif error.status_code == 405:
        kind, title = "method-not-allowed", "Method not allowed"
        allowed = (error.headers or {}).get("Allow", "another one")
        detail = InvalidInputError("method", request.method, "is not for this address", f"use {allowed}")
    return ServiceError(error.status_code, title, detail, kind=kind, headers=error.headers)


def _shown(value: object) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value))
    text = _encodable(text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _encodable(text: str) -> str:
    """The text without halves of characters, which JSON can name and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
