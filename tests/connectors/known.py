"""What stock vLLM, or a connector by itself, does wrong in these lives, by name."""

from __future__ import annotations

import re
from typing import NamedTuple


class Known(NamedTuple):
    """One fault."""

    name: str
    pattern: str  # of the line in ``Ending.faults``
    plugs: tuple[str, ...]  # that must take part
    why: str
    with_kvobs: bool  # whether it is the same with kvobs, as the connector does it by itself


KNOWN = (
    Known(
        "two completions",
        r"died: AssertionError:  \(step",
        ("lmcache-mp",),
        "A request is aborted while one child loads for it, and another one has promised to report its end: both "
        "report, vLLM frees at the first and asserts at the second.",
        with_kvobs=False,
    ),
    Known(
        "resumed with a sibling's hit",
        r"died: AssertionError: Preempted request \w+ has num_computed_tokens",
        ("lmcache-v1",),
        "On the V1 runner LMCache V1 asserts that a resumed request starts where LMCache or vLLM have it; a sibling's "
        "hit is neither.",
        with_kvobs=True,
    ),
    Known(
        "received over and over",
        r"(waits for ever|GPU blocks are not free|keeps )",
        ("flexkv",),
        "FlexKV assigns to finished_recving and finished_sending of the output that its siblings share: what those "
        "reported before it is lost, and their requests wait for ever.",
        with_kvobs=False,
    ),
)


def explain(line: str, plugs: list[str], *, with_kvobs: bool) -> Known | None:
    """Return the known fault that a line shows, if these connectors have one that does."""
    for known in KNOWN:
        has_all = all(any(plug.startswith(name) for plug in plugs) for name in known.plugs)
        if has_all and (known.with_kvobs or not with_kvobs) and re.search(known.pattern, line):
            return known
    return None


HALF_DONE = (
    Known(
        "saves that were never begun",
        r"simple-cpu stored wrong KV",
        ("simple-cpu", "wait_for_save"),
        "SimpleCPUOffload takes a save for done as soon as a later one is, also if it was never begun.",
        with_kvobs=True,
    ),
    Known(
        "blocks of saves that nobody makes",
        r"GPU blocks are not free",
        ("simple-cpu", "build_connector_meta"),
        "SimpleCPUOffload holds the GPU blocks of the saves that it had just ordered; the order was lost with the "
        "exception.",
        with_kvobs=True,
    ),
    Known(
        "blocks of saves that nobody makes",
        r"GPU blocks are not free",
        ("mooncake-store", "build_connector_meta"),
        "MooncakeStore does the same.",
        with_kvobs=True,
    ),
    *(
        Known(
            "blocks of saves whose end was not reported",
            r"GPU blocks are not free",
            (plug, "update_connector_output"),
            "It lets go of blocks when their saves are reported, and the report was lost with the exception.",
            with_kvobs=True,
        )
        for plug in ("simple-cpu", "mooncake-store")
    ),
)
"""What a call that failed half-way leaves inside a connector, where nobody from outside can mend it."""


def explain_isolated(line: str, plug: str, hook: str) -> Known | None:
    """Return what the failure of this hook itself has left inside the connector, if a line is about that."""
    return next((known for known in HALF_DONE if known.plugs == (plug, hook) and re.search(known.pattern, line)), None)
