"""A network's certificate authority: one key in its folder, which signs routers and sites.

While the authority is replaced `authority.pem` holds two certificates: the first one issues, both are trusted. Their names differ, since OpenSSL
finds an issuer by its name. Python 3.13 refuses certificates without the key identifiers of RFC 5280, section 4.2.1.
"""

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pilotlight.support import atomic_files

AUTHORITY_DAYS = 3650
LEAF_DAYS = 398  # validity of certificates: the longest that browsers accept
CLOCKS_DIFFER = timedelta(minutes=10)


class AuthorityError(Exception):
    """A certificate cannot be made; the message has the reason."""


class NewPair(NamedTuple):
    """A private key and its certificate request, both in PEM."""

    key: bytes
    request: bytes


class Authority:
    """The authority in a folder, with its files `authority.pem` and `authority.key`."""

    def __init__(self, folder: Path) -> None:
        """Open an authority. Raises AuthorityError if it does not exist or cannot be read."""
        self.file, self._key_file = folder / "authority.pem", folder / "authority.key"
        try:
            self.pem = self.file.read_bytes()
            self._certificate = x509.load_pem_x509_certificate(self.pem)
            key = serialization.load_pem_private_key(self._key_file.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise AuthorityError(f"the network's authority in {folder} cannot be used: {error}") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

    @classmethod
    def make(cls, folder: Path, network: str) -> "Authority":
        """Create an authority in a folder that has none. Raises OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        common = f"{f'Pilotlight network {network}'[:55]} {secrets.token_hex(4)}"
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        now = datetime.now(UTC)
        certificate = (
            _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        atomic_files.write(folder / "authority.key", _pem_of(key))
        atomic_files.write(folder / "authority.pem", certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.pem)

    def issue(self, request: bytes, host: str, days: float = LEAF_DAYS) -> bytes:
        """Return a certificate in PEM for a request's key and one host name or address. Raises AuthorityError."""
        try:
            asked = x509.load_pem_x509_csr(request)
            is_own = asked.is_signature_valid
        except (ValueError, InvalidSignature):
            is_own = False
        if not is_own:
            raise AuthorityError("this is not a certificate request that is signed by its own key")
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        certificate = (
            _builder(name, self._certificate.subject, asked.public_key(), datetime.now(UTC), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_name_of(host)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def new_pair(host: str) -> NewPair:
    """Make a key and the request for its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return NewPair(_pem_of(key), request.public_bytes(serialization.Encoding.PEM))


def fingerprint_of(pem: bytes) -> str:
    """Return the SHA-256 of a certificate, in hexadecimal. Raises AuthorityError."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise AuthorityError(f"this is not a certificate: {error}") from None
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def _builder(subject: x509.Name, issuer: x509.Name, key: object, now: datetime, days: float) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)  # type: ignore[arg-type]  # the key has the type that the client chose
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
