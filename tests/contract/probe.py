"""Print, as one JSON object, what the vLLM on the path asks of a connector and how a MultiConnector does in it.

Runs in a process of its own, because a process imports one vLLM only::

    PYTHONPATH=<folder of a version>:. python -m tests.contract.probe [--tomorrow]
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOMORROW = "new_hook_of_tomorrow"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tomorrow", action="store_true", help="give vLLM a hook that no version has, and call it")
    arguments = parser.parse_args()
    with only_json_on_stdout() as out, tempfile.TemporaryDirectory(prefix="kvobs-probe-") as scratch:
        report = tomorrow() if arguments.tomorrow else today(Path(scratch))
        json.dump(report, out)


def today(scratch: Path) -> dict[str, Any]:
    """Report the host's hooks and its classes' surface, and how connectors do under kvobs in both roles."""
    import vllm

    from . import drive, members, surface

    return {
        "vllm": vllm.__version__,
        "hooks": members.hooks(),
        "recording": attempt(drive.drive),
        "example": attempt(lambda: drive.drive_examples(scratch)),
        "surface": attempt(surface.compared),
        "testing": attempt(lambda: drive.run_example(scratch)),
    }


def tomorrow() -> dict[str, Any]:
    """Report what becomes of a hook that a newer vLLM adds to its base class and broadcasts in its MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector

    def ignored(self: Any, note: str) -> None:
        return None

    def broadcast(self: Any, note: str) -> None:
        for connector in self._connectors:
            getattr(connector, TOMORROW)(note)

    setattr(base.KVConnectorBase_V1, TOMORROW, ignored)
    setattr(multi_connector.MultiConnector, TOMORROW, broadcast)
    logged = keep_messages()

    from kvobs.testing import Script

    from . import drive

    rig = drive.Engine(Script("a"), Script("b"))
    getattr(rig.connector, TOMORROW)("hello")
    return {
        "recorded": [[list(arguments)] for arguments in rig.arguments[TOMORROW]],
        "logged": [line for line in logged if TOMORROW in line],
        "inherited": getattr(rig.connector, TOMORROW).args[1].__func__ is broadcast,
    }


def attempt(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what came of it, or the error: one scenario's failure must not hide the others."""
    try:
        return what()
    except Exception:
        return {"error": traceback.format_exc()}


def keep_messages() -> list[str]:
    """Return a list that every message of kvobs's loggers will be added to.

    Not by a handler: vLLM configures its loggers more than once, and drops the handlers that others gave them.
    """
    kept: list[str] = []
    make = logging.getLogRecordFactory()

    def make_and_keep(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if "kvobs" in record.name.split("."):
            kept.append(record.getMessage())
        return record

    logging.setLogRecordFactory(make_and_keep)
    return kept


@contextlib.contextmanager
def only_json_on_stdout() -> Iterator[Any]:
    """Send what anything else prints to stderr: the reader of stdout wants one JSON object."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        yield out


if __name__ == "__main__":
    main()
