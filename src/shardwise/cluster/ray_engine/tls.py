"""Certificates for Ray's own traffic: without them its token and the workers' configurations would cross the network in clear.

The coordinator is a small certificate authority (ECDSA P-256); each node gets one certificate for its address, over the
encrypted control channel. Ray's gRPC then is mutual TLS: who has no certificate of this authority does not even connect.
**Fails when** the library is missing (`MissingExtraError`) or a file cannot be written (`UsageError`).
**Called by** the coordinator and the daemons.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

from shardwise.clock import SystemClock
from shardwise.errors import MissingExtraError, UsageError
from shardwise.records import Record

_VALID = datetime.timedelta(days=3650)
_SKEW = datetime.timedelta(days=400)  # a machine's clock may be far off: certificates begin in the past


class TlsMaterial(Record):
    """One node's certificate with its key, as PEM. Secret."""

    ca: str
    certificate: str
    key: str
    address: str  # it is for

    def __repr__(self) -> str:
        return f"TlsMaterial(address={self.address!r}, key=...)"

    def write(self, folder: Path) -> None:
        """Three private files for Ray to read."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, text in (("ca.pem", self.ca), ("node.pem", self.certificate), ("node.key", self.key)):
                beside = folder / f".{name}.new"
                beside.unlink(missing_ok=True)
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                    out.write(text)
                os.replace(beside, folder / name)
        except OSError as error:
            raise UsageError(f"cannot write Ray's certificate: {error.strerror}", where=str(folder)) from error


def tls_environment(folder: str) -> dict[str, str]:
    """What Ray's processes must know; nothing where there is no certificate."""
    if not folder or not (Path(folder) / "node.pem").exists():
        return {}
    files = {"SERVER_CERT": "node.pem", "SERVER_KEY": "node.key", "CA_CERT": "ca.pem"}
    return {"RAY_USE_TLS": "1"} | {f"RAY_TLS_{name}": str(Path(folder) / file) for name, file in files.items()}


class TlsAuthority(Record):
    """The coordinator's own key and certificate, as PEM. Secret."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return "TlsAuthority(...)"

    @classmethod
    def generate(cls, cluster_id: str) -> TlsAuthority:
        """A new authority."""
        x509, ec, hashes, serialization = _library()
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(x509, f"shardwise {cluster_id}")
        basics = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(x509, name, name, key.public_key()).add_extension(basics, critical=True)
        return cls(certificate=_pem(builder.sign(key, hashes.SHA256()), serialization), key=_key_pem(key, serialization))

    def issue(self, node: str, address: str) -> TlsMaterial:
        """A certificate for one node at one address."""
        x509, ec, hashes, serialization = _library()
        own = x509.load_pem_x509_certificate(self.certificate.encode())
        own_key = serialization.load_pem_private_key(self.key.encode(), password=None)
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = dict.fromkeys([address, "127.0.0.1", "::1"])
        names = [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses] + [x509.DNSName("localhost")]
        builder = _builder(x509, own.subject, _name(x509, f"shardwise node {node}"), key.public_key())
        certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(own_key, hashes.SHA256())
        return TlsMaterial(
            ca=self.certificate,
            certificate=_pem(certificate, serialization),
            key=_key_pem(key, serialization),
            address=address,
        )


def _library() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingExtraError.for_extra("ray", "encrypting Ray's traffic") from None
    return x509, ec, hashes, serialization


def _name(x509: Any, text: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])


def _builder(x509: Any, issuer: Any, subject: Any, public_key: Any) -> Any:
    now = datetime.datetime.fromtimestamp(SystemClock().wall_s(), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
    )


def _pem(certificate: Any, serialization: Any) -> str:
    return str(certificate.public_bytes(serialization.Encoding.PEM).decode())


def _key_pem(key: Any, serialization: Any) -> str:
    form = serialization.PrivateFormat.PKCS8
    return str(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode())
