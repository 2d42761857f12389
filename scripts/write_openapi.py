"""Writes the OpenAPI document that the planner serves, from its routes and the dataclasses of what they take and give.

python -m scripts.write_openapi [--check]
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import evenkeel
from evenkeel.placement import PlanRequest, WhatIf
from evenkeel.placement.hardware import HardwareProfile
from scripts.json_schema import add_schema
from services.planner.answers import HitRates, HitRatesRequest, PlanAnswer, WhatIfRequest
from services.planner.app import ROUTES
from services.planner.problems import MEDIA_TYPE, ProblemDocument

PATH = Path(__file__).parents[1] / "services" / "planner" / "openapi.json"
INFO = {
    "title": "Evenkeel planner",
    "summary": "Where each embedding table should live.",
    "description": "Exact placement of embedding tables in HBM and host memory, with its cost and its alternatives.",
    "version": evenkeel.__version__,
}
PROBLEMS = {
    400: "The body is no JSON.",
    401: "A token is wanted, and none that is valid was sent.",
    403: "The token does not allow this.",
    405: "The address has other methods.",
    413: "The body is too large.",
    415: "The body says that it is no JSON.",
    422: "A field is wrong; `errors` names it, its value and what to give instead.",
    429: "Too many requests from one address.",
    500: "The service failed.",
    503: "Too many requests wait: `Retry-After` says when to come back.",
}
EXAMPLE: dict[str, Any] = {
    "tables": [
        {"name": "user_id", "rows": 400_000_000, "dim": 128, "ids_per_sample": 1},
        {"name": "item_id", "rows": 50_000_000, "dim": 128, "ids_per_sample": 200},
    ],
    "topology": {"ranks": 8, "hbm_bytes": 60 << 30, "host_bytes": 1536 << 30},
    "hardware": "h200",
    "step": {"samples_per_rank": 1024},
}
CACHES = {"rows": 10_000_000, "lookups_per_step": 262_144, "cache_rows": [100_000, 1_000_000]}
TAKES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/plans": (PlanRequest, EXAMPLE),
    "/v1/whatif": (WhatIfRequest, {**EXAMPLE, "points": 10}),
    "/v1/hit-rates": (HitRatesRequest, CACHES),
}
GIVES: dict[str, tuple[str, type]] = {
    "/v1/plans": ("The best placement of all tables", PlanAnswer),
    "/v1/whatif": ("What other budgets would buy", WhatIf),
    "/v1/hit-rates": ("What caches of a table miss", HitRates),
    "/v1/hardware-profiles": ("The built-in hardware profiles", HardwareProfile),
    "/v1/hardware-profiles/{name}": ("One built-in hardware profile", HardwareProfile),
}


def document() -> dict[str, Any]:
    """The document, without the limits of one service."""
    schemas: dict[str, Any] = {}
    paths = {}
    problem = {MEDIA_TYPE: {"schema": add_schema(ProblemDocument, schemas)}}
    for route in ROUTES:
        if route.path not in GIVES:
            continue
        summary, kind = GIVES[route.path]
        method = "post" if "POST" in (route.methods or ()) else "get"
        schema = add_schema(kind, schemas)
        schema = {"type": "array", "items": schema} if route.path.endswith("s") and method == "get" else schema
        problems = PROBLEMS | ({404: "There is no such profile."} if "{name}" in route.path else {})
        responses = {str(status): {"description": text, "content": problem} for status, text in problems.items()}
        responses["200"] = {"description": "The answer.", "content": {"application/json": {"schema": schema}}}
        operation: dict[str, Any] = {
            "summary": summary,
            "description": inspect.getdoc(route.endpoint),
            "operationId": re.sub(r"\W", "_", f"{route.name}{route.path}_{method}"),
            "responses": responses,
        }
        if "{name}" in route.path:
            named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "title": "Name"}}
            operation["parameters"] = [named]
        if route.path in TAKES:
            taken, example = TAKES[route.path]
            content = {"application/json": {"schema": add_schema(taken, schemas), "example": example}}
            operation["requestBody"] = {"required": True, "content": content}
        paths[route.path] = {method: operation}
    return {"openapi": "3.1.0", "info": INFO, "paths": paths, "components": {"schemas": schemas}}


def main(arguments: list[str]) -> int:
    """Writes the document, or with `--check` says whether the file is up to date."""
    text = json.dumps(document(), indent=1, sort_keys=True) + "\n"
    if "--check" not in arguments:
        PATH.write_text(text)
        return 0
    old = PATH.read_text() if PATH.is_file() else ""
    difference = list(difflib.unified_diff(old.splitlines(), text.splitlines(), str(PATH), "the service", lineterm=""))
    print(*difference[:100], sep="\n")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
