"""Break kvobs's telemetry from inside, in every process of a server, while a file exists.

The server gets the file's path in its environment under ``SWITCH``. A child connector by this module's path brings the
module into every process: EngineCore, workers and API server import it when they read the configuration, before kvobs
makes its objects there.
"""

import importlib
import os
from collections.abc import Callable
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

from .children_stats import StatsChild

__all__ = ["FAULTS", "SWITCH", "SabotageError", "StatsChild"]

SWITCH = "KVOBS_TESTS_SABOTAGE"
EVERY = 3
"""Of so many calls, one raises."""

# A function inside each contained place, by the name that its caller finds it under.
FAULTS = {
    "record": "kvobs.recorder:_bucketed",
    "trace": "kvobs.traces:new_span_id",
    "flush": "kvobs.recorder:Recorder.take",
    "merge": "kvobs.payload:KvobsStats.aggregate",
    "rebuild": "kvobs.stats:_rebuild_child",
    "apply": "kvobs.metrics:MultiKVConnectorPromMetrics._observe_own",
    "cut": "kvobs.tracing:SpanCutter._span",
    "summarize": "kvobs.stats:summarize",
}


class SabotageError(Exception):
    """What kvobs must contain."""


def sabotage(where: str, path: str, switch: Path) -> None:
    module, _, name = path.partition(":")
    *parents, last = name.split(".")
    owner: Any = reduce(getattr, parents, importlib.import_module(module))
    setattr(owner, last, faulty(where, getattr(owner, last), switch))


def faulty(where: str, real: Callable[..., Any], switch: Path) -> Callable[..., Any]:
    calls = count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if switch.exists() and next(calls) % EVERY == 0:
            raise SabotageError(where)
        return real(*args, **kwargs)

    return call


if SWITCH in os.environ:
    for place, function in FAULTS.items():
        sabotage(place, function, Path(os.environ[SWITCH]))
