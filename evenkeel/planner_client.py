"""Asks a planner service over HTTP, or plans without one: for trainers and the command line."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from evenkeel.credentials import Credentials
from evenkeel.placement import InvalidInputError, Plan, PlanRequest, plan
from evenkeel.placement.fields import decode, encode
from evenkeel.plan_cache import PlanCache

_UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})  # OpenSSL's codes


class PlannerError(RuntimeError):
    """The planner service refused or could not be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerClient:
    """Asks the planner at `url`, or plans in this process where there is none.

    Attributes:
        url: Address of the service, such as `http://planner:8080`; None plans here.
        timeout_s: Time to wait for an answer, on top of the request's own time limit.
        token: The bearer token itself, where the service wants one.
        credentials: Files instead: a token, the authorities of an `https://` address, a client certificate.
        cache: Plans that were made before in this process's place, where there is no service; a service has its own.
    """

    url: str | None = None
    timeout_s: float = 30.0
    token: str | None = None
    credentials: Credentials | None = None
    cache: PlanCache | None = None

    @classmethod
    def of(
        cls, planner: str | None, *, credentials: Credentials | None = None, cache: str | Path | None = None
    ) -> PlannerClient:
        """The client of a planner as flags and variables name it: by its URL; `embedded` or nothing plans here.

        `cache` is the folder of plans that were made before; none are kept where it is empty.
        """
        named = (planner or "").strip()
        kept = PlanCache(folder=Path(cache)) if cache else None
        return cls(url=None if named in ("", "embedded") else named, credentials=credentials, cache=kept)

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> PlannerClient:
        """The planner that `EVENKEEL_PLANNER` names, with the credentials and the cache of the environment.

        Raises:
            ValueError: If a variable of the credentials cannot be used.
        """
        values = os.environ if environment is None else environment
        cache = values.get("EVENKEEL_PLAN_CACHE")
        return cls.of(values.get("EVENKEEL_PLANNER"), credentials=Credentials.from_env(values), cache=cache)

    def plan(self, request: PlanRequest) -> Plan:
        """The plan of a request.

        Raises:
            PlannerError: If the service refused or could not be reached.
            ValueError: If the address or a file of the credentials cannot be used, or a token of a file would be sent
                in the clear.
            InvalidInputError: If the request contradicts itself (without a service).
        """
        if self.url is not None:
            return self._ask(self.url, request)
        return plan(request) if self.cache is None else self.cache.plan(request, lambda: plan(request))

    def _ask(self, url: str, request: PlanRequest) -> Plan:
        place = _place(url)
        known = self.credentials or Credentials()
        headers = {"Content-Type": "application/json", **self._authorization(place, known)}
        address = f"{url.rstrip('/')}/v1/plans"
        call = urllib.request.Request(address, json.dumps(encode(request)).encode(), headers, method="POST")
        trust = known.ssl_context()
        try:
            timeout = self.timeout_s + request.solver.time_limit_s
            with urllib.request.urlopen(call, timeout=timeout, context=trust) as answer:
                value = json.load(answer)
        except urllib.error.HTTPError as error:
            raise PlannerError(f"{address} answered {error.code}: {_detail(error)}{_remedy(error, headers)}") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            remedy = f"{_advice(place, reason)}, or plan without a service"
            raise PlannerError(f"{address}: {reason}; {remedy}") from None
        except ValueError as error:
            raise PlannerError(f"{address} answered what is no JSON: {error}; check the address") from None
        try:
            return decode(Plan, value["plan"])
        except (InvalidInputError, KeyError, TypeError) as error:
            what = error if isinstance(error, InvalidInputError) else "no plan is in it"
            remedy = "check that it is a planner of this version"
            raise PlannerError(f"{address} answered what cannot be read: {what}; {remedy}") from None

    def _authorization(self, place: SplitResult, known: Credentials) -> dict[str, str]:
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        if known.token_file is None:
            return {}
        secure = place.scheme == "https"
        shown = known if secure and known.secure else replace(known, tls=secure, ca=None, certificate=None, key=None)
        try:
            return {key.title(): value for key, value in shown.metadata(f"{place.hostname}:{place.port or 443}")}
        except ValueError as error:
            remedy = "" if secure else f"; {place.geturl()} needs https:// for a token"
            raise ValueError(f"{error}{remedy}") from None


def _place(url: str) -> SplitResult:
    try:
        place = urlsplit(url)
        known = place.scheme in ("http", "https") and place.hostname and place.port != 0
    except ValueError:  # brackets or a port that are none
        known = False
    if not known:
        raise ValueError(f"the planner's url is {url!r}; give http://host:port or https://host:port")
    return place


def _advice(place: SplitResult, reason: object) -> str:
    """What to look at when no answer came."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        authority = reason.verify_code in _UNKNOWN_AUTHORITY
        return "set EVENKEEL_TLS_CA to the file of its authority" if authority else "have its certificate mended"
    proxy = urllib.request.getproxies().get(place.scheme)
    if proxy and not urllib.request.proxy_bypass(str(place.hostname)):
        named = proxy.rpartition("@")[2]  # without its user and password
        return f"it was asked for through the proxy {named}: add {place.hostname} to no_proxy"
    if (
        place.scheme == "http"
        and isinstance(reason, ConnectionError)
        and not isinstance(reason, ConnectionRefusedError)
    ):
        return "if it speaks TLS, use https://"
    return "check the address"


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(100_000)
        return str(json.loads(text).get("detail", error.reason))
    except (ValueError, AttributeError, OSError):
        return str(error.reason)


def _remedy(error: urllib.error.HTTPError, headers: dict[str, str]) -> str:
    if error.code != 401 or "Authorization" in headers:
        return ""
    return "; give a token: --token-file or EVENKEEL_TOKEN_FILE"
