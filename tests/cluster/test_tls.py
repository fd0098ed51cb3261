"""Certificates for Ray: issued for one address by one authority, private on disk, hidden in text."""

from __future__ import annotations

import datetime
import ipaddress
import stat
from pathlib import Path

import pytest
from cryptography import x509

from shardwise.cluster.ray_engine import RaySecurity
from shardwise.cluster.ray_engine.settings import ray_environment
from shardwise.cluster.ray_engine.tls import TlsAuthority, tls_environment
from shardwise.errors import UsageError


def test_a_certificate_is_of_its_authority_and_for_its_address() -> None:
    authority, other = TlsAuthority.generate("one"), TlsAuthority.generate("two")
    issued = authority.issue("nas", "192.168.7.5")
    certificate = x509.load_pem_x509_certificate(issued.certificate.encode())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate.encode()))
    with pytest.raises(ValueError):
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(other.certificate.encode()))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("192.168.7.5") in names.get_values_for_type(x509.IPAddress)
    year = datetime.timedelta(days=365)
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now - year < now + 9 * year < certificate.not_valid_after_utc


def test_files_are_private_and_nothing_secret_is_shown(tmp_path: Path) -> None:
    authority = TlsAuthority.generate("one")
    issued = authority.issue("nas", "fd00::5")
    folder = tmp_path / "tls"
    issued.write(folder)
    issued.write(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "node.key", "node.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert "PRIVATE" not in repr(issued) + repr(authority)
    environment = ray_environment(RaySecurity(token="t", tls_folder=str(folder)))
    assert environment["RAY_USE_TLS"] == "1"
    assert Path(environment["RAY_TLS_SERVER_KEY"]).read_text() == issued.key
    assert tls_environment(str(tmp_path / "none")) == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write Ray's certificate"):
        issued.write(tmp_path / "file" / "below")
