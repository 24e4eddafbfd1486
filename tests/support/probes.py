"""Both probes, and recorders that count by one of them and by a clock of a test's."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from unittest import mock

import pytest

from kvobs.probe import compiled, native
from kvobs.probe.pure import Probe, PureProbe
from kvobs.probe.recorder import Recorder
from tests.support.numbers import numbers

Kind = Callable[..., Probe]
PROBES: dict[str, Kind] = {"python": PureProbe, "c": compiled.Probe}
each_probe = pytest.mark.parametrize("kind", PROBES.values(), ids=PROBES)


def recorder_of(kind: Kind, *args: Any, clock: Callable[[], int] = perf_counter_ns, **more: Any) -> Recorder:
    """Return a recorder whose probe is of this kind and reads this clock."""
    with mock.patch.object(native, "probe", lambda *page: kind(*page, clock)):
        return Recorder(*args, **more)


def counts(recorder: Recorder) -> dict[int, int]:
    """Return what a recorder has counted, by slot."""
    return numbers(recorder).counts
