"""The certificate of one run, or of one cluster: all its processes have it; in memory, or in files for other machines.

``python -m cluster.certificate DIRECTORY`` writes the files, for a cluster that is started by hand. It is as Dask makes
one (`distributed.Security.temporary`), but it is valid from long before now: with that one, nobody could connect any
more once the system's clock was set back.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

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


def write(directory: Path, security: Security | None = None) -> tuple[Path, Path]:
    """A certificate as ``cert.pem``, which is its own authority too, and ``key.pem``; this user alone may read them.

    Args:
        security: what `certificate` made; None: a new one.

    Raises:
        FileExistsError: there is one already, which some process may use.
    """
    made: Any = security or certificate()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = directory / "cert.pem", directory / "key.pem"
    for file, text in zip(files, (made.tls_ca_file, made.tls_worker_key), strict=True):
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="Write cert.pem and key.pem for all processes of a cluster.")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="made here; keep it out of git")
    try:
        print(*write(parser.parse_args().directory.absolute()))
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}: a cluster may use it; delete it, or name another directory")


if __name__ == "__main__":
    main()
