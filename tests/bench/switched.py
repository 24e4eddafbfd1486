"""A steered connector in an engine whose requests choose the load policy: ``{"policy": ...}`` beside their orders.

So one engine serves all policies in turns, in the same minute and with the same caches. Each policy is kvobs's own
code; what requests of the others load, ``fastest`` does not learn from.
"""

from __future__ import annotations

from typing import Any

from kvobs.routing.policies import Fastest, LoadPolicy, Longest
from kvobs.state.transfers import Load
from tests.engine.children import SteeredChild

_KEPT = 3000
"""Blocks; those of all prompts that are asked again are less than that."""

_OTHERS: dict[str, LoadPolicy] = {"first": LoadPolicy(), "longest": Longest()}

_choose, _admitted, _load_ended = Fastest.choose, Fastest.admitted, Fastest.load_ended
_of_others: set[str] = set()
"""Requests of the other policies."""


class SwitchedChild(SteeredChild):
    """Is imported by the engine together with what follows; keeps what comes first, or it would fill all memory."""

    def _blocks_to_save(self, tracked: Any) -> list[tuple[int, str]]:
        return super()._blocks_to_save(tracked) if len(self._stored) < _KEPT else []


def _chosen(self: Fastest, request: Any, *args: Any) -> Any:
    policy = (request.kv_transfer_params or {}).get("policy", "fastest")
    if policy == "fastest":
        return _choose(self, request, *args)
    _of_others.add(request.request_id)
    return _OTHERS[policy].choose(request, *args)


def _on_admitted(self: Fastest, request_id: str, load: Load) -> None:
    if request_id not in _of_others:
        _admitted(self, request_id, load)


def _on_load_ended(self: Fastest, request_id: str, load: Load) -> None:
    if request_id not in _of_others:
        _load_ended(self, request_id, load)


for owner, name, call in (
    (Fastest, "choose", _chosen),
    (Fastest, "admitted", _on_admitted),
    (Fastest, "load_ended", _on_load_ended),
):
    setattr(owner, name, call)
