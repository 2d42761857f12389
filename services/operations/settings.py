"""What an operator can set on either service: by flag, else by environment variable, else by file.

An unknown setting is an error, wherever it stands; the message names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from services.security.transport import Transport, is_ipv6


class ServiceSettings(BaseSettings):
    """The settings that both services have; each derives its own and sets `env_prefix`."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True, extra="forbid", frozen=True, cli_kebab_case=True)

    config: Path | None = None
    """YAML or TOML file with any of these settings; flags and environment variables go before it."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: for all."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    port_file: Path | None = None
    """File to write the bound port to once the service is ready."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus metrics."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus metrics, /healthz and /readyz; unset: none, 0 picks a free one."""
    metrics_port_file: Path | None = None
    """File to write the bound port of the metrics to."""
    tls_certificate: Path | None = None
    """PEM file of the certificate and its intermediates; a renewed one is taken up without a restart."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key."""
    tls_client_ca: Path | None = None
    """PEM file of the authorities of client certificates, which are then required."""
    allow_plaintext: bool = False
    """Whether to listen without TLS on addresses that others can reach."""
    token_file: Path | None = None
    """YAML file of bearer tokens (see `services.security.issue`), followed when it changes; unset: none needed."""
    max_connections: PositiveInt = 1000
    """Connections at a time."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level to log; debug logs every round or request."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How to log; auto: console on a terminal, JSON lines otherwise."""

    @field_validator("host", "metrics_host")
    @classmethod
    def _bare_host(cls, host: str) -> str:
        """An address or a name alone; those of IPv6 may stand in brackets."""
        bare = host.strip("[]")
        if not bare.strip() or "/" in host or (":" in bare and not is_ipv6(bare)):
            raise PydanticCustomError("host", "it must be an address or a name alone, without scheme, port or path")
        return bare

    def transport(self) -> Transport:
        """How the service may be reached."""
        return Transport(
            certificate=self.tls_certificate,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            allow_plaintext=self.allow_plaintext,
        )


AnySettings = TypeVar("AnySettings", bound=ServiceSettings)

# What Kubernetes puts into every pod of a namespace for a Service of that name, unless `enableServiceLinks: false`.
_SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S*")


def load(
    kind: type[AnySettings],
    program: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AnySettings:
    """Settings from flags, environment and the file that either names.

    Args:
        kind: The service's settings.
        program: How it is started, for `--help`.
        arguments: The command line without the program's name.
        environment: Variables to look at; the process's own when None.

    Raises:
        ValueError: If a setting is unknown or wrong, or the file is missing; the message names it as it was given.
        SystemExit: If `--help` was asked for.
    """
    prefix = kind.model_config["env_prefix"]
    variables = _read_variables(prefix, kind.model_fields, os.environ if environment is None else environment)
    path = _config_path(arguments, variables.get("config"))
    filed = {} if path is None else _read_file(path)
    flagged: dict[str, Any] = {}

    class _Sourced(kind):  # type: ignore[valid-type, misc]
        __doc__ = kind.__doc__

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            **_defaults: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            flags = CliSettingsSource[BaseSettings](settings_cls, cli_parse_args=list(arguments), cli_prog_name=program)
            flagged.update(flags())
            named = (InitSettingsSource(settings_cls, init_kwargs=values) for values in (variables, filed))
            return flags, *named

    def written(name: str) -> str:
        """A setting as whoever set it wrote it."""
        if name in flagged:
            return f"--{name.replace('_', '-')}"
        return f"{prefix}{name.upper()}" if name in variables else f"{name} in {path}"

    try:
        return _Sourced()
    except ValidationError as error:
        raise ValueError("\n".join(_sentence(each, written) for each in error.errors())) from None


def _read_variables(prefix: str, settings: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The text of each setting that a variable names."""
    values: dict[str, str] = {}
    for variable, value in environment.items():
        if not variable.upper().startswith(prefix):
            continue
        rest = variable[len(prefix) :].upper()
        if _SERVICE_LINK.fullmatch(rest) or (rest == "PORT" and _LINK_VALUE.fullmatch(value)):
            continue
        if rest.lower() not in settings:
            near = difflib.get_close_matches(rest.lower(), settings, n=1)
            meant = f"did you mean {prefix}{near[0].upper()}?" if near else "--help lists the settings"
            raise ValueError(f"{variable} is set, but there is no such setting; {meant}")
        if not value.strip():
            raise ValueError(f"{variable} is set and empty; give it a value, or unset it")
        values[rest.lower()] = value
    return values


def _sentence(error: Any, written: Callable[[str], str]) -> str:
    name = written(".".join(map(str, error["loc"])))
    if error["type"] == "extra_forbidden":
        return f"{name} is no setting; --help lists them"
    message = str(error["msg"])
    return f"{name} is {str(error['input'])!r}: {message[:1].lower()}{message[1:]}"


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"config is {str(path)!r}, which is no file; pass the path of a YAML or TOML file")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(path.read_text())
        if path.suffix in (".yaml", ".yml"):
            document = yaml.safe_load(path.read_text())
        else:
            raise ValueError(f"config is {str(path)!r}; its name must end in .yaml, .yml or .toml")
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} cannot be read: {error}") from None
    if not isinstance(document, dict | None) or not all(isinstance(name, str) for name in document or {}):
        raise ValueError(f"config {path} must hold settings by name, such as 'port: 50051'")
    return document or {}


def _config_path(arguments: Sequence[str], named: str | None) -> Path | None:
    for at, argument in enumerate(arguments):
        if argument == "--config" and at + 1 < len(arguments):
            return Path(arguments[at + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return Path(named) if named else None
