"""Compare what each reproduction finds under this vLLM with what docs/vllm-faults.md says."""

import sys
from importlib import import_module
from typing import Any

SEEN: dict[str, dict[str, Any]] = {
    "placeholders_kept": {
        "tokens of the prompt": 65,
        "tokens scheduled to recompute it": 67,
        "tokens sent that were computed on the lost blocks": 1,
    },
    "unfilled_blocks": {"the client leaves": {"b": 1}, "chunks": {"a": 32, "b": 1}},
    "reserved_twice": {"blocks that the request needs": 8, "free": 14, "after 100 steps": "WAITING"},
    "loaded_behind_failed": {"tokens in 100 steps": 0, "free blocks": 18, "next step, with a aborted": {"b": 112}},
    "freed_at_first_report": {"blocks that are not free": 0, "at the end of the load": "AssertionError"},
    "counted_not_by_rank": {
        "saves complete, though the second rank reported none": {"a"},
        "loads kept that one rank reported": 1000,
    },
    "tracing_without_stats": {"at the end of a request": "AssertionError"},
}
"""What each module's ``reproduce`` returns while the fault is there."""


def mended(name: str) -> str:
    """Return what differs from the page, or nothing."""
    found = import_module(name).reproduce()
    return "" if found == SEEN[name] else f"{name} is mended: update docs/vllm-faults.md (now {found})"


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(mended, SEEN))) or None)
