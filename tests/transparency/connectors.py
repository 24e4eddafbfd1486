"""Recording connectors: every hook that this vLLM knows is noted with its arguments, then answered as the life says.

A hook that a connector calls on itself (vLLM's base class does that) is not noted: no router makes that call.
"""

import functools
import inspect
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput

from tests.transparency.behaviour import Books, Half, SchedulerHalf, WorkerHalf
from tests.transparency.life import FULL, LEAN, PLAIN, Life
from tests.transparency.record import Run

CONTENT = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta")
"""The fields of an output that both routers show to a connector alike."""


class ConnectorError(Exception):
    """What a connector raises, if it does."""


@dataclass
class Stage:
    """One life with one router."""

    life: Life
    run: Run
    halves: tuple[type[SchedulerHalf], type[WorkerHalf]] = (SchedulerHalf, WorkerHalf)
    books: Books = field(init=False)

    def __post_init__(self) -> None:
        self.books = Books(self.life, self.run)


STAGES: dict[str, Stage] = {}
"""By the tag that is in a connector's extra config: what its parts share."""


class Answers(KVConnectorBase_V1):
    """A connector, whose half of this process answers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        stage = STAGES[self._kv_transfer_config.get_from_extra_config("stage", "")]
        self.index = index = self._kv_transfer_config.get_from_extra_config("connector", 0)
        self.run, self.is_within = stage.run, False
        self.raises, self.calls_left = stage.life.connectors[index].raises
        about = self, stage.life, index, stage.books
        if role is KVConnectorRole.SCHEDULER:
            self.who = f"connector {index} scheduler"
            self.half: Half = stage.halves[0](*about)
        else:
            rank = vllm_config.parallel_config.rank
            self.who = f"connector {index} rank {rank}"
            self.half = stage.halves[1](*about, rank=rank)

    def note(self, hook: str, *arguments: Any) -> None:
        """Note a call of a hook; raise if it is the one at which this connector does."""
        self.run.note(self.who, hook, *arguments)
        if hook == self.raises and not self.run.is_over and not any(map(_is_empty_output, arguments)):
            self.calls_left -= 1
            if not self.calls_left:
                raise ConnectorError(f"{self.who} in {hook}")

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Take those of every stage, also of a lean connector; vLLM's base class raises."""


def _is_empty_output(argument: Any) -> bool:
    """Return whether it is an output without content, which kvobs may show in a step in which vLLM shows none."""
    return isinstance(argument, KVConnectorOutput) and not any(getattr(argument, name, None) for name in CONTENT)


def _noting(name: str, plain_hook: Any) -> Any:
    """Return the hook ``name`` with a note of each call."""

    @functools.wraps(plain_hook)
    def hook(self: Answers, *arguments: Any, **more: Any) -> Any:
        answer = getattr(self.half, f"on_{name}", None) or functools.partial(plain_hook, self)
        if self.is_within:
            return answer(*arguments, **more)
        self.note(name, *arguments, *chain.from_iterable(sorted(more.items())))
        self.is_within = True
        try:
            return answer(*arguments, **more)
        finally:
            self.is_within = False

    vars(hook).pop("__isabstractmethod__", None)
    return hook


def _hooks(*classes: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cls in classes:
        for name, member in vars(cls).items():
            if not name.startswith("_") and inspect.isfunction(member) and name != "has_connector_metadata":
                found[name] = _noting(name, member)
    return found


_NEEDED = {
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished"),
    *("request_finished_all_groups", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "wait_for_save", "get_finished", "get_block_ids_with_load_errors"),
}
"""What a lean connector has of its own; ``get_finished`` is how connectors of before vLLM 0.30 report."""

_ALL, _OF_HMA = _hooks(KVConnectorBase_V1), _hooks(SupportsHMA)

Full: Any = type("Full", (Answers, SupportsHMA), {**_ALL, **_OF_HMA})
Plain: Any = type("Plain", (Answers,), _ALL)
Lean: Any = type(
    "Lean", (Answers, SupportsHMA), {name: hook for name, hook in {**_ALL, **_OF_HMA}.items() if name in _NEEDED}
)
for _made in (Full, Plain, Lean):
    _made.__module__ = __name__

CLASSES = {FULL: "Full", PLAIN: "Plain", LEAN: "Lean"}
