"""Asking a planner service, and planning without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from evenkeel.credentials import Credentials
from evenkeel.placement import Plan, PlanRequest, plan
from evenkeel.planner_calls import PlannerError, ask_planner

__all__ = ["PlannerClient", "PlannerError"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerClient:
    """Asks the planner at `url`, or plans in this process where there is none.

    Attributes:
        url: Address of the service, such as `http://planner:8080`; embedded where `None`.
        timeout_s: Time to wait for an answer, on top of the request's own time limit.
        token: Bearer token, where the service wants one.
        credentials: Files instead: a token, the authorities of an `https://` address, a client certificate.
    """

    url: str | None = None
    timeout_s: float = 30.0
    token: str | None = None
    credentials: Credentials | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """The plan of `request`.

        Raises:
            PlannerError: If the service refused or could not be reached.
            ValueError: If the address or a file of the credentials cannot be used.
            InvalidInputError: If the request contradicts itself (without a service).
        """
        if self.url is None:
            return plan(request)
        return ask_planner(self.url, request, timeout_s=self.timeout_s, credentials=self.credentials, token=self.token)

    async def plan_async(self, request: PlanRequest) -> Plan:
        """The same as `plan`, off the event loop."""
        return await asyncio.to_thread(self.plan, request)
