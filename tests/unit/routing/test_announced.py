"""What the router announces of each request, and in which order."""

from __future__ import annotations

from typing import Any

from kvobs.state.transfer_listener import TransferListener
from kvobs.state.transfers import Gain, Load, Save, Stray
from kvobs.testing import BLOCK, Rig, Script


class Announced(TransferListener):
    """Notes the events of a rig from now on, by request."""

    def __init__(self, rig: Rig) -> None:
        self.events: dict[str, list[tuple[Any, ...]]] = {}
        rig.connector._side.listener = rig.connector._side.completions.listener = self

    def _note(self, request_id: str, *event: Any) -> None:
        self.events.setdefault(request_id, []).append(event)

    def looked_up(self, request: Any, began_ns: int, ended_ns: int) -> None:
        assert 0 < began_ns <= ended_ns
        self._note(request.request_id, "looked up")

    def allocated(self, request_id: str, offers: Any, local: int, owner: int | None, tokens: int) -> None:
        self._note(request_id, "allocated", offers, local, owner, tokens)

    def admitted(self, request_id: str, load: Load) -> None:
        assert load.blocks
        assert load.size > 0
        self._note(request_id, "admitted", load.child, load.tokens)

    def load_ended(self, request_id: str, load: Load) -> None:
        self._note(request_id, "load ended", load.outcome)

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        assert gain.waited_ns >= (gain.resume_ns or 0) >= 0
        self._note(request_id, "weighed", load.outcome)

    def sync_loads_failed(self, child: int, loads: int, reset: Any) -> None:
        self._note("", "sync loads failed", child, loads, reset)

    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        self._note(request_id, "aborted", load.child, by_error)

    def promised(self, request_id: str, promised: Any, early: Any) -> None:
        self._note(request_id, "promised", sorted(promised), sorted(early))

    def saved(self, request_id: str, child: int, save: Save, ended_ns: int) -> None:
        assert ended_ns >= save.promised_ns > 0
        self._note(request_id, "saved", child, save.outcome)

    def stray(self, report: Stray) -> None:
        self._note(report.request, "stray", report.child, report.kind)

    def request_ended(self, request_id: str) -> None:
        self._note(request_id, "ended")


KV = (2 * BLOCK, True)
LOADED: list[tuple[Any, ...]] = [
    ("looked up",),
    ("allocated", [(0, 2 * BLOCK), (1, 0)], 0, 0, 2 * BLOCK),
    ("admitted", 0, 2 * BLOCK),
]
AGAIN: tuple[Any, ...] = ("allocated", [], 0, None, 0)  # after an async load


def test_of_a_load_and_a_promised_save(a: Script, b: Script) -> None:
    a.offers["r"] = KV
    b.promises.add("r")
    rig = Rig("kvobs", a, b)
    announced = Announced(rig)
    rig.add("r", max_tokens=1)
    rig.run(2)
    a.say(0, received="r")
    rig.run(4)
    b.say(0, saved="r")
    rig.run(2)
    assert announced.events == {
        "r": [*LOADED, ("load ended", "ok"), AGAIN, ("promised", [1], []), ("ended",), ("saved", 1, "ok")]
    }


def test_of_a_request_without_offers_and_promises(a: Script, b: Script) -> None:
    rig = Rig("kvobs", a, b)
    announced = Announced(rig)
    rig.add("r", max_tokens=1)
    rig.run(4)
    assert announced.events == {"r": [("looked up",), ("allocated", [(0, 0), (1, 0)], 0, None, 0), ("ended",)]}


def test_of_an_aborted_load_whose_child_has_promised_a_save(a: Script, b: Script) -> None:
    a.offers["r"] = KV
    a.promises.add("r")
    rig = Rig("kvobs", a, b)
    announced = Announced(rig)
    rig.add("r")
    rig.step()
    rig.abort("r")
    rig.step()
    a.say(0, received="r")
    rig.step()
    a.say(0, saved="r")
    rig.run(4)
    ended = [("promised", [0], []), ("aborted", 0, False), ("ended",), ("load ended", "aborted"), ("saved", 0, "ok")]
    assert announced.events == {"r": [*LOADED, *ended]}


def test_of_a_save_that_is_done_before_its_promise(a: Script, b: Script) -> None:
    b.promises.add("r")
    rig = Rig("kvobs", a, b)
    announced = Announced(rig)
    rig.add("r", max_tokens=3)
    rig.step()
    b.say(0, saved="r")
    rig.run(6)
    assert announced.events["r"][2:] == [("promised", [], [1]), ("ended",)]


def test_of_a_failed_sync_load_and_the_caches_that_were_reset_after_it(a: Script, b: Script) -> None:
    a.offers["r"] = [(2 * BLOCK, False), (0, False)]
    b.answers["reset_cache"] = True
    names = ["one", "two"]
    rig = Rig("kvobs", a, b, kvobs={"names": names, "reset_after_failed_sync_load": names})
    announced = Announced(rig)
    rig.add("r", max_tokens=1)
    a.bad_blocks[0] = {2}
    rig.run(4)
    assert announced.events[""] == [("sync loads failed", 0, 1, ["two"])]
    assert ("load ended", "failed") in announced.events["r"]
