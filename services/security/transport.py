"""How a service may be reached: TLS files, and plaintext only where nobody else can listen."""

from __future__ import annotations

import ipaddress
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from evenkeel.credentials import is_loopback

log = structlog.get_logger(__name__)

T = TypeVar("T")

_EXPIRED = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The transport of a service.

    Attributes:
        certificate: PEM file of the server's certificate and its intermediates; None: plaintext.
        key: PEM file of its private key.
        client_ca: PEM file of the authorities whose client certificates are accepted, and then required; None: clients
            need none.
        allow_plaintext: Whether plaintext may be served beyond this machine.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    allow_plaintext: bool = False

    @property
    def secure(self) -> bool:
        """Whether there is TLS."""
        return self.certificate is not None

    def check(self, host: str, *, prefix: str) -> None:
        """Refuses what would expose the service by mistake.

        Args:
            host: The address that the service will listen on.
            prefix: Of the settings' names, for messages: `EVENKEEL_BALANCER_`.

        Raises:
            ValueError: If plaintext would be served beyond this machine without leave, or TLS files do not fit.
        """
        if (self.certificate is None) != (self.key is None):
            missing, there = ("tls_key", "tls_certificate") if self.key is None else ("tls_certificate", "tls_key")
            raise ValueError(f"{there} is set and {missing} is not: TLS needs both")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("tls_client_ca is set without tls_certificate: client certificates need TLS")
        if self.secure:
            self.read()
        elif not self.allow_plaintext and not is_loopback(host):
            raise ValueError(
                f"host is {host!r}, which others can reach, and there is no TLS: set {prefix}TLS_CERTIFICATE and "
                f"{prefix}TLS_KEY, listen on 127.0.0.1, or set {prefix}ALLOW_PLAINTEXT=true on a trusted network"
            )

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Certificate chain, key and client authorities as PEM, checked to belong together.

        Raises:
            ValueError: If a file cannot be read or does not hold what it should; the message names the file.
        """
        assert self.certificate is not None
        assert self.key is not None
        chain, key = _read(self.certificate, "tls_certificate"), _read(self.key, "tls_key")
        authorities = None if self.client_ca is None else _read(self.client_ca, "tls_client_ca")
        self._check_dates(self.context())
        return chain, key, authorities

    def _check_dates(self, ours: ssl.SSLContext) -> None:
        """Refuses an expired certificate, which no client accepts: told by a handshake with it in memory.

        One that holds from a moment later on is left to the clients, whose clocks may be ahead.
        """
        assert self.certificate is not None
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        theirs.check_hostname = False
        theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted
        theirs.load_verify_locations(self.certificate)
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [theirs.wrap_bio(down, up), ours.wrap_bio(up, down, server_side=True)]
        for end in (*ends, *ends):
            try:
                end.do_handshake()
            except ssl.SSLError as error:  # it wants to read, or minds something else
                if getattr(error, "verify_code", None) == _EXPIRED:
                    raise ValueError(f"tls_certificate {self.certificate} has expired; renew it") from None

    def context(self) -> ssl.SSLContext:
        """A server context of these files, TLS 1.2 or later.

        Raises:
            ValueError: If a file cannot be read or does not hold what it should; the message names the file.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Loads the files into a context, for the connections from now on.

        Raises:
            ValueError: If a file cannot be read or does not hold what it should; the message names the file.
        """
        assert self.certificate is not None
        assert self.key is not None
        try:
            # A key with a passphrase must not make a service ask for it on a terminal.
            context.load_cert_chain(self.certificate, self.key, password=_refuse_passphrase)
        except (OSError, ValueError) as error:
            text = str(error)
            if "PEM lib" in text or "no start line" in text.lower():
                text = f"not both hold what they should, in PEM ({text})"
            raise ValueError(
                f"tls_certificate {self.certificate} and tls_key {self.key} cannot be used together: {text}"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise ValueError(f"tls_client_ca {self.client_ca} cannot be used: {error}") from None
            context.verify_mode = ssl.CERT_REQUIRED

    def follow(self, *, check_seconds: float = 0.0) -> Followed:
        """Its files, as they are now."""
        return Followed("TLS files", self.certificate, self.key, self.client_ca, check_seconds=check_seconds)


class Followed:
    """Files that may be replaced while a service runs, and are read again then.

    What cannot be used is reported, and what was read before stays in force.
    """

    def __init__(
        self,
        what: str,
        *paths: Path | None,
        check_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes them as they are now; what is read for the first time is read after this.

        Args:
            what: They are, for the log.
            paths: The files; None: none.
            check_seconds: How often to look whether they have changed, at most.
            clock: Seconds, for that.
        """
        self._what, self._paths = what, paths
        self._check_seconds, self._clock, self._checked_at = check_seconds, clock, clock()
        self._lock = threading.Lock()
        self._stamps = [_stamp_of(path) for path in paths]

    def load(self, read: Callable[[], T]) -> T | None:
        """What `read` makes of files that have changed; None where none has, or they cannot be used."""
        with self._lock:
            now = self._clock()
            if now - self._checked_at < self._check_seconds:
                return None
            self._checked_at = now
            before, self._stamps = self._stamps, [_stamp_of(path) for path in self._paths]
            if self._stamps == before:
                return None
            try:
                fresh = read()
            except ValueError as error:
                log.error(f"{self._what} cannot be used; what was read before stays in force", error=str(error))
                return None
        log.info(f"{self._what} read again")
        return fresh


def is_ipv6(host: str) -> bool:
    """Whether this is an IPv6 address, without brackets."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return False


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase; store it without one, readable by the service alone")


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{field} {path} cannot be read: {error.strerror}") from None


def _stamp_of(path: Path | None) -> tuple[int, int, int] | None:
    """Changes when a file does, also by a link that is swapped, as Kubernetes does with secrets."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)
