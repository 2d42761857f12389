"""What a client shows to the service, and by what it knows the service: files that may be renewed while it runs."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # needed only where a gRPC service is
    import grpc

_MAX_TOKEN_LENGTH = 512
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Files of this host; ranks use their own, unlike other options, which rank 0 chooses for all.

    They are read at each connection, so a renewed certificate or token holds from the next one on.

    Attributes:
        tls: Whether to use TLS; implied by any of the TLS files.
        ca: PEM file of the authorities by which the service is known; None: those of the system.
        certificate: PEM file of this client's certificate, where the service asks for one.
        key: PEM file of its private key.
        token_file: File that holds the bearer token and nothing else.
    """

    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing, there = ("key", "certificate") if self.key is None else ("certificate", "key")
            raise ValueError(f"{there} is set and {missing} is not: a client certificate needs both")

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Credentials:
        """From `EVENKEEL_TLS` (1: TLS with the system's authorities), `EVENKEEL_TLS_CA`, `EVENKEEL_TLS_CERTIFICATE`,
        `EVENKEEL_TLS_KEY` and `EVENKEEL_TOKEN_FILE`; what is unset is not used.

        Raises:
            ValueError: If `EVENKEEL_TLS` is no truth value, or only one of certificate and key is set.
        """  # noqa: D205
        values = os.environ if environment is None else environment
        tls = values.get("EVENKEEL_TLS", "").strip().lower()
        if tls not in _TRUE | _FALSE:
            raise ValueError(f"EVENKEEL_TLS is {tls!r}; use 1 or 0")

        def path(name: str) -> Path | None:
            value = values.get(name, "").strip()
            return Path(value) if value else None

        return cls(
            tls=tls in _TRUE,
            ca=path("EVENKEEL_TLS_CA"),
            certificate=path("EVENKEEL_TLS_CERTIFICATE"),
            key=path("EVENKEEL_TLS_KEY"),
            token_file=path("EVENKEEL_TOKEN_FILE"),
        )

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return self.tls or self.ca is not None or self.certificate is not None

    def check(self, address: str) -> None:
        """Checks that the files can be read and that the token is not sent in the clear.

        Args:
            address: `host:port` of the service.

        Raises:
            ValueError: If not; the message names the file or the setting.
        """
        self.metadata(address)
        for field in ("ca", "certificate", "key"):
            _read(field, getattr(self, field))

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """A new channel to the service.

        Raises:
            ValueError: If a file cannot be read.
        """
        import grpc

        # Balancers are beside the trainers: a proxy for the way out, which gRPC would take, is none for the way there.
        options = [("grpc.enable_http_proxy", 0), *options]
        if not self.secure:
            return grpc.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            _read("ca", self.ca), _read("key", self.key), _read("certificate", self.certificate)
        )
        return grpc.secure_channel(address, credentials, options=options)

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS; None for what the system says by itself.

        Raises:
            ValueError: If a file cannot be used.
        """
        if self.ca is None and self.certificate is None:
            return None
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        except OSError as error:  # also what is no certificate
            raise ValueError(f"ca {self.ca} cannot be used: {error}") from None
        try:
            if self.certificate is not None:
                context.load_cert_chain(str(self.certificate), str(self.key))
        except OSError as error:
            text = f"certificate {self.certificate} and key {self.key} cannot be used together: {error}"
            raise ValueError(text) from None
        return context

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What goes with each call: the token.

        Raises:
            ValueError: If the token's file cannot be read or holds something else, or the token would be readable on
                the network.
        """
        if self.token_file is None:
            return ()
        if not self.secure and not is_loopback(address.rpartition(":")[0]):
            raise ValueError(
                f"token_file is set, and the connection to {address} would send the token in the clear: set tls or ca "
                "(EVENKEEL_TLS, EVENKEEL_TLS_CA)"
            )
        token = (_read("token_file", self.token_file) or b"").strip()
        if not token or len(token) > _MAX_TOKEN_LENGTH or not all(33 <= byte <= 126 for byte in token):
            raise ValueError(f"token_file {self.token_file} does not hold one token; write the token and nothing else")
        return (("authorization", f"Bearer {token.decode()}"),)


def read_credentials(ca: Path | None, token_file: Path | None) -> Credentials:
    """Credentials of the environment, with what the flags say instead.

    Raises:
        ValueError: If the environment holds something that cannot be used.
    """
    environment = Credentials.from_env(os.environ)
    return replace(environment, ca=ca or environment.ca, token_file=token_file or environment.token_file)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name: whatever it resolves to, today or tomorrow


def _read(field: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ValueError(f"{field} {path} cannot be read: {error.strerror}") from None
