"""What `evenkeel doctor` checks of a planner."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path

from trainer_client.cli.findings import Finding, Status

_MAX_SKEW_SECONDS = 30.0


def check_planner(planner: str, ca: Path | None, timeout: float, *, now: Callable[[], float]) -> list[Finding]:
    """Whether a planner is ready, and whether its clock and ours agree."""
    url = planner.rstrip("/") + "/readyz"
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        with urllib.request.urlopen(url, timeout=timeout, context=context) as response:
            date = response.headers.get("date")
    except urllib.error.HTTPError as error:
        remedy = "it starts or drains: try again in a while" if error.code == 503 else "is this a planner's address?"
        return [Finding("planner", Status.FAIL, f"{url} answers {error.code}", remedy)]
    except (OSError, ValueError) as error:
        return [Finding("planner", Status.FAIL, f"{url}: {error}", "check the URL, the network and EVENKEEL_TLS_CA")]
    findings = [Finding("planner", Status.OK, "ready")]
    if date is not None:
        skew = now() - parsedate_to_datetime(date).timestamp()
        if abs(skew) > _MAX_SKEW_SECONDS:
            findings.append(Finding("clocks", Status.WARN, f"ours is {skew:+.0f} s off the planner's",
                                    "synchronise both: certificates and tokens expire by them"))  # fmt: skip
        else:
            findings.append(Finding("clocks", Status.OK, "agree with the planner's"))
    return findings
