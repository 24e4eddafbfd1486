"""Configure a connector that can have a fault, and order the fault while its engine runs."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvobs.testing.server import Server
from tests.engine.serving import of_tests, prompt


def faulty(folder: Path, rank: int) -> dict[str, Any]:
    """Return the connector `remote`, which has a fault on this rank once there is a file `trigger`."""
    remote = of_tests("FaultyConnector", trigger=str(folder / "trigger"), rank=rank)
    return remote | {"kv_connector_module_path": "tests.incidents.faulty"}


def begin(server: Server, folder: Path, hook: str, fault: str) -> None:
    """Let the fault begin, by a request."""
    (folder / "order").write_text(f"{hook} {fault}")
    (folder / "order").rename(folder / "trigger")

    def ask() -> None:
        with suppress(Exception):
            server.complete(prompt("incident"), 2)

    threading.Thread(target=ask, daemon=True).start()
