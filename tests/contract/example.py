"""Run the example of ``docs/testing.md``, and a load on two ranks, with the vLLM on the path; print the result as JSON.

::

    PYTHONPATH=<folder of a version>:. python -m tests.contract.example
"""

import json
import tempfile
from pathlib import Path

from tests.support.example import TESTS, imported

from .probe import only_json_on_stdout


def main() -> None:
    with only_json_on_stdout() as out, tempfile.TemporaryDirectory(prefix="kvobs-example-") as scratch:
        import vllm

        with imported(Path(scratch)) as example:
            for name in TESTS:
                getattr(example, name)()
        json.dump({"vllm": vllm.__version__, "passed": TESTS, "statuses": statuses()}, out)


def statuses() -> list[str]:
    """Return the states of a request whose load ends on one rank, then on the other, and is then saved by both."""
    from kvobs.testing import Rig, Script

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


if __name__ == "__main__":
    main()
