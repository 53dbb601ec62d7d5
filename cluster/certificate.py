"""The certificate of one run: all its processes have it, and it is in memory alone.

It is as Dask makes one (`distributed.Security.temporary`), but it is valid from long before now: with that one, nobody
could connect any more once the system's clock was set back.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from distributed import Security

NAME = "dask-internal"
KEY_BITS = 2048
VALID_FOR = timedelta(days=3650)
"""Before now as well as after it: no clock is that wrong, and no run is that long."""


def certificate() -> Security:
    """A new key, and a certificate that it signed itself."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_FOR)
        .not_valid_after(now + VALID_FOR)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    public = signed.public_bytes(pem).decode()
    roles = ("client", "scheduler", "worker")
    parts = {f"tls_{role}_{part}": text for role in roles for part, text in (("key", private), ("cert", public))}
    return Security(require_encryption=True, tls_ca_file=public, **parts)
