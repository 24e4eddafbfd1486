"""Run the example of ``docs/testing.md``, and a load on two ranks, with the vLLM on the path."""

from pathlib import Path
from typing import Any

from kvobs.testing import Rig, Script
from tests.support.example import TESTS, imported


def run(scratch: Path) -> dict[str, Any]:
    """Return which tests of the example passed, and the states of the load's request."""
    with imported(scratch) as example:
        for name in TESTS:
            getattr(example, name)()
    return {"passed": TESTS, "statuses": statuses()}


def statuses() -> list[str]:
    """Return the states of a request whose load ends on one rank, then on the other, and is then saved by both."""
    script = Script("a", offers={"r": (32, True)}, promises={"r"})
    rig = Rig("kvobs", script, ranks=2)
    rig.add("r")
    rig.step()
    seen = [rig.status("r")]
    for rank in (0, 1):
        script.say(rank, received="r")
        rig.run(1 + 4 * rank)
        seen.append(rig.status("r"))
    for rank in (0, 1):
        script.say(rank, saved="r")
    rig.run(2)
    assert rig.held_blocks == 0
    return [*seen, rig.status("r")]
