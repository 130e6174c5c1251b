"""Certificates and node keys of a deployment: one authority, one server certificate, one key pair a site.

Made with `cryptography` only, so that no machine needs an openssl binary. Private keys are readable by their owner only
and are never written over.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCKS_DIFFER = datetime.timedelta(days=1)  # a site whose clock is a little behind must not see a certificate of tomorrow


@dataclass(frozen=True)
class Authority:
    """Signs server certificates; its certificate is all that a site has to trust."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def make_authority(name: str, days: int) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _certificate(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def load_authority(certificate: Path, key: Path) -> Authority:
    loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
    if not isinstance(loaded, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
        raise ValueError("expected an elliptic curve or RSA key")
    return Authority(x509.load_pem_x509_certificate(certificate.read_bytes()), loaded)


def signs_certificates(authority: Authority) -> bool:
    """Whether the certificate is an authority's, has not ended, and belongs to the key."""
    try:
        constraints = authority.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        return False
    ended = authority.certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC)
    return constraints.ca and not ended and authority.certificate.public_key() == authority.key.public_key()


def make_server_certificate(authority: Authority, addresses: Sequence[str], days: int) -> tuple[bytes, bytes]:
    """Certificate and private key, both PEM. It is good for exactly these names and addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, addresses[0][:64])])
    issuer = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    builder = (
        _certificate(subject, authority.certificate.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_alternative(a) for a in addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    certificate = builder.sign(authority.key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM), private_pem(key)


def names_of(certificate: bytes) -> set[str]:
    """The names and addresses that a server certificate is good for."""
    found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = found.get_values_for_type(x509.IPAddress)
    return {*found.get_values_for_type(x509.DNSName), *map(str, addresses)}


def days_left(certificate: bytes) -> int:
    """Whole days until the certificate ends; negative when it has."""
    return (x509.load_pem_x509_certificate(certificate).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def make_node_key() -> tuple[bytes, bytes]:
    """A SuperNode's private and public key: ECDSA P-384 in OpenSSH's format, as Flower wants them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"


def private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def write_private(path: Path, secret: bytes) -> None:
    """A file that only its owner can read, from its first byte on; never over an existing one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER - datetime.timedelta(days=max(0, -days)))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
