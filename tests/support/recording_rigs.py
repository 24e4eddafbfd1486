"""Rigs that record, and what they have recorded."""

from pathlib import Path
from typing import Any

import pytest
from kvobs.telemetry.timeline import flight

from kvobs.cli.timeline import recordings
from kvobs.cli.timeline.recordings import Process
from kvobs.testing import BLOCK, Rig, Script


def recording_rig(folder: Path, *scripts: Script, **more: Any) -> Rig:
    more["kvobs"] = {"names": ["one", "two"][: len(scripts)], "timeline": {"dir": str(folder)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight, "BYTES", 1 << 20)
        return Rig("kvobs", *scripts, **more)


def by_name(folder: Path) -> dict[str, Process]:
    return {process.name: process for process in recordings.load(folder)}


def served(folder: Path, a: Script, b: Script) -> Rig:
    """An async load by one, a save by the other, a sync load, on two ranks."""
    rig = recording_rig(folder, a, b, ranks=2)
    a.offers |= {"load": (2 * BLOCK, True), "sync": (BLOCK, False), "bad": (BLOCK, True)}
    b.promises.add("save")
    for name in ("load", "save", "sync", "bad"):
        rig.add(name)
    rig.run(2)
    a.say(0, received="load", failed="bad")
    a.say(1, received="load bad")
    rig.run(2)
    for rank in range(2):
        b.say(rank, saved="save")
    rig.run(4)
    return rig
