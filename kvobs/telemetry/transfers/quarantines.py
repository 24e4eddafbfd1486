"""Record the quarantines of isolated connectors."""

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.events import Observer

_QUARANTINED, _QUARANTINES = map(signals.slot, (signals.QUARANTINED, signals.QUARANTINES))


class Quarantines(Observer):
    """Counts quarantines, and shows which connectors are in one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def quarantined(self, child: int) -> None:
        self._recorder.set_gauge(child, _QUARANTINED, 1)
        self._recorder.count(child, _QUARANTINES)

    def readmitted(self, child: int) -> None:
        self._recorder.set_gauge(child, _QUARANTINED, 0)
