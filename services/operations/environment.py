"""Settings from environment variables: each known one is taken, each unknown one of the prefix is an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# What Kubernetes puts into every pod of a namespace for a Service of that name, unless `enableServiceLinks: false`.
_SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """What the environment says about one service.

    Attributes:
        values: Text of each setting that a variable names.
        links: Names of variables that Kubernetes made for a Service; none of them is a setting.
    """

    values: dict[str, str]
    links: tuple[str, ...]


def read_variables(prefix: str, settings: Collection[str], environment: Mapping[str, str]) -> Variables:
    """The settings among the variables of a prefix.

    Args:
        prefix: What the names of the service's variables begin with, such as `EVENKEEL_BALANCER_`.
        settings: Names of the settings, in lower case.
        environment: All variables.

    Raises:
        ValueError: If a variable of the prefix names no setting, the message names it and the nearest one; or is empty,
            as where a template has left out what it should hold.
    """
    values: dict[str, str] = {}
    links = []
    for variable, value in environment.items():
        if not variable.upper().startswith(prefix):
            continue
        rest = variable[len(prefix) :].upper()
        if _SERVICE_LINK.fullmatch(rest) or (rest == "PORT" and _LINK_VALUE.fullmatch(value)):
            links.append(variable)
        elif rest.lower() in settings:
            if not value.strip():
                raise ValueError(f"{variable} is set and empty; give it a value, or unset it")
            values[rest.lower()] = value
        else:
            near = difflib.get_close_matches(rest.lower(), settings, n=1)
            meant = f"did you mean {prefix}{near[0].upper()}?" if near else "--help lists the settings"
            raise ValueError(f"{variable} is set, but there is no such setting; {meant}")
    return Variables(values=values, links=tuple(sorted(links)))
