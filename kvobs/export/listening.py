"""Listen at the exporter's address, and find what prevents that or is open to others."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress

from kvobs.export.web_config import UnusableError, context
from kvobs.log import line
from kvobs.schema import kinds
from kvobs.schema.findings import Finding, show
from kvobs.schema.options import ExporterOptions

PLACES = 64
"""Connections at a time; where all are taken, the oldest of the address with the most is closed for a new one."""
OPEN_TO_ALL = "every client that reaches the port can read the metrics, because it has neither TLS nor authentication"
LESS_OPEN = "set kvobs.exporter.web_config, or let only Prometheus reach the port"


def findings(exporter: ExporterOptions, path: str, *, is_here: bool = True) -> Iterator[Finding]:
    """Yield why an exporter with these options, which stand at ``path``, can't listen here now, or is open to others.

    The port may also be taken by an exporter that already runs. What this machine lacks has no meaning if the exporter
    is not to run here.
    """
    assert exporter.port is not None
    if exporter.web_config is not None and is_here:
        try:
            context(exporter.web_config)
        except UnusableError as error:
            yield kinds.WEB_CONFIG.at(f"{path}.web_config", error=error.strerror)
    try:
        if is_here:
            listen(exporter.host, exporter.port).close()
        if exporter.web_config is None and is_reached_from_elsewhere(exporter.host):
            yield kinds.OPEN.at(path, host=show(exporter.host), harm=OPEN_TO_ALL, remedy=LESS_OPEN)
    except OSError as error:
        if not is_here:
            return
        if error.errno == errno.EADDRINUSE:
            yield kinds.PORT_IN_USE.at(path, port=exporter.port, holder=holder(exporter.port))
        else:
            host = show(exporter.host)
            yield kinds.NO_LISTENING.at(path, host=host, port=exporter.port, error=error.strerror)


def is_loopback(address: str) -> bool:
    """Return whether a client with this address is on this machine."""
    return ipaddress.ip_address(address.partition("%")[0].removeprefix("::ffff:")).is_loopback


def is_reached_from_elsewhere(host: str) -> bool:
    """Return whether a server that listens there can be reached from other machines; OSError for an unknown name."""
    return not is_loopback(_resolve(host, 0)[1])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; OSError if that fails."""
    if port >= 1 << 16:  # of an engine far down a data-parallel group
        raise OSError(errno.EINVAL, f"port {port} is above 65535, the highest")
    family, address = _resolve(host, port)
    # A name may resolve to an IPv6 address where the kernel has no IPv6: dualstack_ipv6 raises ValueError.
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=family, backlog=PLACES, dualstack_ipv6=is_dual)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    return family, str(address[0])


def holder(port: int) -> str:
    """Return the process that listens on a port, as "pid 1 (name)"; "another process" where that can't be seen."""
    import psutil  # while nothing is wrong it costs no memory

    with suppress(psutil.Error, OSError):  # of another user, or gone
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None:
                # Not its command line, which may contain passwords.
                return f"pid {each.pid} ({line(psutil.Process(each.pid).name())})"
    return "another process"
