"""Asking services over HTTP."""

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

SECONDS = 60.0  # a starved machine is no failure


def get(url: str, token: str | None = None, *, context: ssl.SSLContext | None = None) -> tuple[int, Any]:
    """Status, and what the body says: an object, or a text where it is no JSON; no proxy is asked."""
    request = urllib.request.Request(url, None, {"Authorization": f"Bearer {token}"} if token else {})
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=SECONDS) as response:
            status, kind, body = response.status, response.headers["content-type"] or "", response.read()
    except urllib.error.HTTPError as error:
        status, kind, body = error.code, error.headers["content-type"] or "", error.read()
    return status, json.loads(body) if "json" in kind else body.decode()
