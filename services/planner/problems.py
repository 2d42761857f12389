"""Every error as a problem document (RFC 9457)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from evenkeel.placement import InvalidInputError

MEDIA_TYPE = "application/problem+json"
_SHOWN = 80

_HTTP_KINDS = {
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "Method not allowed"),
    413: ("too-large", "Body too large"),
}

_WORDS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "expected": "one of",
    "expected_tags": "one of",
    "min_length": "a length of at least",
    "max_length": "a length of at most",
}

log = structlog.get_logger(__name__)


class FieldProblem(BaseModel):
    """What is wrong with one field."""

    field: str = Field(description="Path of the field.", examples=["tables[0].rows"])
    value: str = Field(description="The value as given, shortened.", examples=["0"])
    problem: str = Field(description="What is wrong with it.")
    remedy: str = Field(description="What to give instead.")


class Problem(BaseModel):
    """A problem document."""

    type: str = Field(description="What kind of problem it is.", examples=["urn:evenkeel:problem:invalid-input"])
    title: str = Field(description="The kind of problem in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What happened, and what to do.")
    instance: str = Field(description="The path that was asked for.")
    errors: list[FieldProblem] = Field(default=[], description="The fields that are wrong, if any.")


class ServiceError(Exception):
    """A problem that the service itself raises."""

    def __init__(self, status: int, kind: str, title: str, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.kind, self.title, self.detail, self.headers = status, kind, title, detail, headers


def problem_response(
    path: str,
    status: int,
    kind: str,
    title: str,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """A response with a problem document."""
    problem = Problem(
        type=f"urn:evenkeel:problem:{kind}",
        title=title,
        status=status,
        detail=detail,
        instance=path,
        errors=list(errors),
    )
    return JSONResponse(problem.model_dump(), status, headers, media_type=MEDIA_TYPE)


def field_path(location: Sequence[int | str]) -> str:
    """A path such as `tables[0].rows` from the location that pydantic gives."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{part}"
    return path


def install_problem_handlers(app: FastAPI) -> None:
    """Answers every error of `app` with a problem document."""

    @app.exception_handler(InvalidInputError)
    async def invalid_input(request: Request, error: InvalidInputError) -> Response:
        wrong = FieldProblem(field=error.field, value=_shown(error.value), problem=error.problem, remedy=error.remedy)
        return problem_response(request.url.path, 422, "invalid-input", "Invalid input", str(error), [wrong])

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        wrong = [_from_pydantic(item) for item in error.errors()[:20]]
        first = wrong[0] if wrong else None
        detail = f"{first.field}: {first.problem}" if first else "the request cannot be understood"
        if any(item.get("type") == "json_invalid" for item in error.errors()):
            return problem_response(request.url.path, 400, "no-json", "Not JSON", detail, wrong)
        return problem_response(request.url.path, 422, "invalid-input", "Invalid input", detail, wrong)

    @app.exception_handler(ServiceError)
    async def service(request: Request, error: ServiceError) -> Response:
        path = request.url.path
        return problem_response(path, error.status, error.kind, error.title, error.detail, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kind, title = _HTTP_KINDS.get(error.status_code, ("http", "Request refused"))
        headers = dict(error.headers) if error.headers else None
        detail = str(error.detail)
        return problem_response(request.url.path, error.status_code, kind, title, detail, headers=headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("request_failed", path=request.url.path, error=repr(error))
        detail = "the service failed; its log tells why"
        return problem_response(request.url.path, 500, "internal", "Internal error", detail)


def _from_pydantic(item: dict[str, Any]) -> FieldProblem:
    location = [part for part in item["loc"] if part not in ("body", "query", "path")]
    field = field_path(location) or "body"
    if item["type"] == "json_invalid":
        return FieldProblem(
            field="body",
            value="",
            problem=f"is no JSON: {item.get('ctx', {}).get('error', item['msg'])}",
            remedy="send a JSON object",
        )
    expected = item.get("ctx", {})
    remedy = "see the field in /openapi.json"
    if item["type"] == "extra_forbidden":
        remedy = "leave it out, or correct its name"
    elif item["type"] == "missing":
        remedy = "give it"
    elif words := [f"{_WORDS[key]} {value}" for key, value in expected.items() if key in _WORDS]:
        remedy = f"give {', '.join(words)}"
    return FieldProblem(field=field, value=_shown(item.get("input")), problem=item["msg"], remedy=remedy[:500])


def _shown(value: object) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = "nan" if isinstance(value, float) and math.isnan(value) else repr(type(value))
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
