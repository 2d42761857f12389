"""Every error as a problem document (RFC 9457)."""

from __future__ import annotations

import json
from dataclasses import dataclass

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from evenkeel.placement import InvalidInputError
from evenkeel.placement.codec import encode

MEDIA_TYPE = "application/problem+json"
_SHOWN = 80

_HTTP_KINDS = {
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "Method not allowed"),
    413: ("too-large", "Body too large"),
    503: ("overloaded", "Overloaded"),
}

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

    @classmethod
    def of(cls, name: str, value: object, what: str, remedy: str) -> FieldProblem:
        """A problem with a value as it was given."""
        return cls(field=_encodable(name), value=_shown(value), problem=what, remedy=remedy)

    @property
    def sentence(self) -> str:
        """All of it in words."""
        return f"{self.field}: {self.problem} (got {self.value}); {self.remedy}"


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
    """A problem that the service itself raises."""

    def __init__(
        self,
        status: int,
        kind: str,
        title: str,
        detail: str,
        headers: dict[str, str] | None = None,
        errors: tuple[FieldProblem, ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.kind, self.title, self.detail = status, kind, title, detail
        self.headers, self.errors = headers, errors


def problem(
    path: str, status: int, kind: str, title: str, detail: str, errors: tuple[FieldProblem, ...] = ()
) -> ProblemDocument:
    """A problem document."""
    name = f"urn:evenkeel:problem:{kind}"
    return ProblemDocument(
        type=name, title=title, status=status, detail=_encodable(detail), instance=_encodable(path), errors=errors
    )


def invalid_input(path: str, error: InvalidInputError) -> ProblemDocument:
    """The problem document of a value that cannot be used."""
    wrong = FieldProblem.of(error.field, error.value, error.problem, error.remedy)
    return problem(path, 422, "invalid-input", "Invalid input", str(error), (wrong,))


def problem_response(
    path: str,
    status: int,
    kind: str,
    title: str,
    detail: str,
    errors: tuple[FieldProblem, ...] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """A response with a problem document."""
    document = problem(path, status, kind, title, detail, errors)
    return JSONResponse(encode(document), status, headers, media_type=MEDIA_TYPE)


def install_problem_handlers(app: FastAPI) -> None:
    """Answers every error of `app` with a problem document."""

    @app.exception_handler(ServiceError)
    async def service(request: Request, error: ServiceError) -> Response:
        path = request.url.path
        return problem_response(path, error.status, error.kind, error.title, error.detail, error.errors, error.headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kind, title = _HTTP_KINDS.get(error.status_code, ("http", "Request refused"))
        headers = dict(error.headers) if error.headers else None
        wrong = _wrong(app, request, error)
        detail = str(error.detail) if wrong is None else wrong.sentence
        errors = () if wrong is None else (wrong,)
        return problem_response(request.url.path, error.status_code, kind, title, detail, errors, headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("request_failed", path=request.url.path, error=repr(error))
        detail = "the service failed; its log tells why"
        return problem_response(request.url.path, 500, "internal", "Internal error", detail)


def _wrong(app: FastAPI, request: Request, error: HTTPException) -> FieldProblem | None:
    """What of the request line is wrong, where that is."""
    if error.status_code == 404:
        known = sorted(app.openapi()["paths"])
        return FieldProblem.of("path", request.url.path, "is no address here", f"use one of: {', '.join(known)}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another one")
        return FieldProblem.of("method", request.method, "is not for this address", f"use {allowed}")
    return None


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
