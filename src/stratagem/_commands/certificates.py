"""``stratagem certificates``: create a cluster's own authority, and certificates for its tasks."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def run(options: argparse.Namespace) -> int:
    """Write the certificates and print how to use them."""
    lines = make_certificates(Path(options.directory), options.name or ["task"], days=options.days)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def make_certificates(directory: Path, names: Sequence[str], *, days: int) -> list[str]:
    """Write one certificate and private key per name; return what to print.

    An authority that is in the directory already signs them, so that tasks can be added later.

    Raises:
        ModuleNotFoundError: the package ``cryptography`` is not installed.
        FileExistsError: a certificate of that name exists.
    """
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`stratagem certificates` needs the package 'cryptography': pip install 'stratagem[tls]'."
        ) from error
    taken = [name for name in names if (directory / f"{name}.pem").exists()]
    if taken or "ca" in names:
        raise FileExistsError(
            f"{directory / (taken or ['ca'])[0]}.pem exists or is the authority's: expected new names "
            f"(--name), or an empty directory. Nothing was written."
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _authority(directory, days)
    for name in names:
        key = _new_key()
        certificate = _certificate(name, key, authority, days=days)
        _write(directory / f"{name}-key.pem", _private(key), private=True)
        _write(directory / f"{name}.pem", _public(certificate))
    where, first = directory.absolute(), names[0]
    return [
        f"{len(names)} certificates in {where}, valid for {days} days. For each task, copy ca.pem and its two files, and set:",
        f"  export STRATAGEM_TLS_CERT={where / first}.pem",
        f"  export STRATAGEM_TLS_KEY={where / first}-key.pem",
        f"  export STRATAGEM_TLS_CA={where / 'ca.pem'}",
        "Keep ca-key.pem away from the tasks: its owner can add tasks to the cluster.",
    ]


def _authority(directory: Path, days: int) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path, key_path = directory / "ca.pem", directory / "ca-key.pem"
    if path.exists():
        try:
            key = load_pem_private_key(key_path.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the authority {str(path)!r} cannot be used: {error}. Expected ca.pem and ca-key.pem, or neither."
            ) from error
        assert isinstance(key, EllipticCurvePrivateKey)
        return certificate, key
    key = _new_key()
    certificate = _certificate("stratagem cluster authority", key, None, days=10 * days)
    _write(key_path, _private(key), private=True)
    _write(path, _public(certificate))
    return certificate, key


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    authority: tuple[x509.Certificate, EllipticCurvePrivateKey] | None,
    *,
    days: int,
) -> x509.Certificate:
    """Return a certificate signed by the authority, or by itself if there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signer = (subject, key) if authority is None else (authority[0].subject, authority[1])
    now = dt.datetime.now(dt.UTC)
    usage = x509.KeyUsage(
        digital_signature=authority is not None,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority is None,
        crl_sign=authority is None,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=authority is None, path_length=None)
    identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer_identity = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))  # clocks differ between hosts
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identity, critical=False)
        .add_extension(issuer_identity, critical=False)
        .sign(signer, hashes.SHA256())
    )


def _private(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600 if private else 0o644), "wb") as file:
        file.write(data)
