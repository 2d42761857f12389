"""Certificates for tests, and the channels that use them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate of an authority, as PEM files."""

    ca: Path
    certificate: Path
    key: Path


def write_certificate(
    authority: trustme.CA, folder: Path, name: str, *, expires: datetime.datetime | None = None
) -> Files:
    """A certificate for this machine's names."""
    folder.mkdir(parents=True, exist_ok=True)
    issued = authority.issue_cert("localhost", "127.0.0.1", common_name=name, not_after=expires)
    files = Files(folder / f"{name}-ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem")
    authority.cert_pem.write_to_path(files.ca)
    issued.private_key_pem.write_to_path(files.key)
    files.certificate.unlink(missing_ok=True)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(files.certificate, append=True)
    return files


def channel(address: str, ca: Path | None, client: Files | None = None, token: str | None = None) -> grpc.Channel:
    """A channel over TLS (plaintext without `ca`), with a client certificate and a token if given."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if ca is None and token is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.local_channel_credentials()  # nothing is encrypted on this machine's own addresses
    if ca is not None:
        files = () if client is None else (client.key.read_bytes(), client.certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *files)
    if token is not None:
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
    return grpc.secure_channel(address.replace("127.0.0.1", "localhost"), credentials, options=options)
