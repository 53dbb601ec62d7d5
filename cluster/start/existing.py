"""Connects to an existing Dask cluster, if that is safe.

Whoever can connect to a Dask process can run any code in it. So a scheduler on another machine is only reached
through TLS, unless the settings say that the network between is trusted.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, Security
from distributed.deploy.cluster import Cluster

from spotlight.records import SpotlightError

ExistingCluster = str | Path | Client | Cluster
CONNECT_S = 10.0
SAFE = ("tls", "wss", "inproc")
"""Protocols that others can neither read nor write to."""
IN_PROCESS = "inproc://"
"""Begins the address of a scheduler that only its own process reaches."""
WITH_PORT = ("tcp", "tls", "ws", "wss")
"""Protocols whose addresses need a port."""


def connect(existing: ExistingCluster, *, insecure: bool) -> Client:
    """A new client, apart from a notebook's own; each run is known by its client.

    Certificates are those of the given client or cluster; for an address, those of Dask's configuration.

    Raises:
        SpotlightError: it cannot be reached, or it is not safe to.
    """
    address, security = where(existing)
    refuse_unsafe(address, insecure=insecure)
    _require_certificate(address, security)
    try:
        return Client(address, security=security, timeout=CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise SpotlightError(_unreachable(address, error)) from None


def check_reach(existing: ExistingCluster) -> None:
    """
    Raises:
        SpotlightError: nothing listens there, or a certificate or TLS that is needed there is missing.
    """
    address, security = where(existing)
    url = urlsplit(address)
    if url.scheme not in WITH_PORT:
        return
    _require_certificate(address, security)
    try:
        socket.create_connection((url.hostname, url.port), timeout=CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # a host's name may have no form in DNS
        raise SpotlightError(_unreachable(address, error)) from None


def check_outlives(existing: ExistingCluster) -> None:
    """
    Raises:
        SpotlightError: it is in this process, so that a driver that is another one cannot reach it.
    """
    address, _ = where(existing)
    if address.startswith(IN_PROCESS):
        raise SpotlightError(
            f"{address}: this cluster is in this process, and the driver of a detached run is another one: start the "
            "run with detached=False, or on a `dask scheduler`"
        )


def where(existing: ExistingCluster) -> tuple[str, Security | None]:
    """Address of the scheduler, and certificates, None for those of Dask's configuration.

    Raises:
        SpotlightError: there is no such file, or it is no scheduler file.
    """
    if isinstance(existing, Cluster):
        if existing.scheduler_comm is None:
            raise SpotlightError(f"{existing}: this cluster has not begun: await it, or give its scheduler's address")
        return str(existing.scheduler_address), getattr(existing, "security", None)
    if isinstance(existing, Client):
        if existing.scheduler is None:
            raise SpotlightError(f"{existing}: this client is not connected: await it, or give its address")
        return str(existing.scheduler.address), existing.security
    text = str(existing)
    if "://" in text:
        _check_port(text)
        return text, None
    file = Path(os.path.expanduser(text))  # a Path raises where there is no such user
    if not os.path.isfile(file):  # a Path raises where the name is too long
        raise SpotlightError(
            f"{text!r} is neither an address, such as tls://head:8786, nor a scheduler file, which `dask scheduler "
            "--scheduler-file FILE` writes"
        )
    try:
        return str(json.loads(file.read_text())["address"]), None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpotlightError(
            f"{file}: is no scheduler file ({error!r}); `dask scheduler --scheduler-file {file}` writes one"
        ) from None


def _check_port(address: str) -> None:
    try:
        url = urlsplit(address)
    except ValueError:  # an IPv6 address that does not end
        url = urlsplit("")
    if url.scheme not in (*WITH_PORT, *SAFE, "ucx"):
        raise SpotlightError(f"{address}: is no address of a Dask scheduler: give one such as tls://head:8786")
    try:
        known = url.scheme not in WITH_PORT or url.port is not None
    except ValueError:
        known = False
    if not known:
        raise SpotlightError(f"{address}: names no port: give it as in {url.scheme}://{url.hostname or 'head'}:8786")


def refuse_unsafe(address: str, *, insecure: bool) -> None:
    """
    Raises:
        SpotlightError: others could reach this scheduler, too, and run any code in it.
    """
    scheme = urlsplit(address).scheme
    if insecure or scheme in SAFE or _is_loopback(urlsplit(address).hostname or ""):
        return
    raise SpotlightError(
        f"{address}: anybody who reaches this scheduler, or listens to it, can run code in all its processes: start it "
        "and the workers with TLS and give tls://...; on a network that is yours alone, set cluster.insecure = true"
    )


def _is_loopback(host: str) -> bool:
    try:
        found: list[Any] = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(entry[4][0].partition("%")[0]).is_loopback for entry in found)


def _require_certificate(address: str, security: Security | None) -> None:
    if security is None and urlsplit(address).scheme in ("tcp", "ws") and Security().require_encryption:
        raise SpotlightError(
            f"{address}: this address is without TLS, and Dask's configuration requires it "
            "(DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION): give the scheduler's tls://... address"
        )
    if security is not None or urlsplit(address).scheme not in ("tls", "wss"):
        return
    known = Security().get_tls_config_for_role("client")  # of Dask's configuration
    for name in ("ca_file", "cert", "key"):
        file = known.get(name) or ""
        if file and "\n" not in file and not Path(file).is_file():  # else it is the certificate itself
            raise SpotlightError(
                f"{address}: there is no file {file}, which Dask's configuration names as the {name} of TLS here: in "
                "DASK_DISTRIBUTED__COMM__TLS__CA_FILE and so on give whole paths"
            )
    if not (known["ca_file"] and known["cert"]):
        raise SpotlightError(
            f"{address}: there is no certificate to show it: export DASK_DISTRIBUTED__COMM__TLS__CA_FILE, and "
            "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT and __KEY (docs/clusters.md says how they are made)"
        )


def _unreachable(address: str, error: Exception) -> str:
    cause = re.sub(r"^in <[^>]*>: ", "", str(error.__cause__ or "") or str(error) or repr(error))
    nobody = any(said in cause for said in ("Connection refused", "not known", "No address"))
    if address.startswith("tls://") and not nobody:
        return (
            f"{address}: no scheduler answers there, or it does not accept our certificate, or we not its ({cause}): "
            "check the address, and tls.ca-file, tls.client.cert and tls.client.key in Dask's configuration "
            "(DASK_DISTRIBUTED__COMM__TLS__CA_FILE and so on)"
        )
    return f"{address}: no scheduler answers there ({cause}): check the address, and that `dask scheduler` runs"
