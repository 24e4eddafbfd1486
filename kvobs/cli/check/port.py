"""Check whether the exporter can listen on its port on this machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Any

from kvobs.export.http_server import holder, resolve
from kvobs.schema.config import EXPORTER_VARIABLE, PATH
from kvobs.schema.findings import Finding, show
from kvobs.schema.options import ExporterOptions


def findings(exporter: ExporterOptions | None, extra: Any) -> list[Finding]:
    """Return a warning if the exporter could not listen here now; its engine may be running, or be for elsewhere.

    Args:
        exporter: the options, None if it is off.
        extra: ``kv_connector_extra_config``, to name what sets the port.
    """
    if exporter is None or exporter.port is None:
        return []
    try:
        _try_to_listen(exporter.host, exporter.port)
    except (OSError, ValueError) as error:  # ValueError: not a host name
        options = extra.get("kvobs") if isinstance(extra, Mapping) else None
        is_option = isinstance(options, Mapping) and "exporter" in options
        by_variable = not is_option and os.environ.get(EXPORTER_VARIABLE)
        path = f"environment variable {EXPORTER_VARIABLE}" if by_variable else f"{PATH}.kvobs.exporter"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            found = f"found port {exporter.port}, which is in use on this machine: held by {holder(exporter.port)}"
            fix = "end that process, unless it is the exporter of this engine, which runs already; or use another port"
            return [Finding(path, found, fix=fix)]
        reason = getattr(error, "strerror", None) or "not a host name"
        found = f"found {show(exporter.host)} and port {exporter.port}, where this machine can't listen: {reason}"
        return [Finding(path, found, fix="use an address of the engine's machine, and a port that its user may open")]
    return []


def _try_to_listen(host: str, port: int) -> None:
    """Listen for a moment, as the exporter would; OSError if that fails."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server that ended don't count
        probe.bind((address, port))
        probe.listen()
