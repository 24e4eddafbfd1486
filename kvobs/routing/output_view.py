"""Show the workers' output to the children, and process their additions and withdrawals.

As with vLLM's own router every child gets the same output object, and sees all received, failed and sent requests,
whoever loaded or saved them: HiSparse needs its siblings' receipts. Worker metadata, KV events and stats are the
child's own, as when it runs alone: SpoolCache raises at stats of another class. A child may change its own: FlexKV
reports its receipts here, MoRIIO withholds reports until it is ready. Changes to other children's requests are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvobs.children.child import Child
from kvobs.routing.metadata import MultiKVConnectorWorkerMetadata, MultiKVEvents
from kvobs.routing.visibility import Visibility
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Stray
from kvobs.telemetry.payload.stats import class_path, own_stats, with_own_stats
from kvobs.telemetry.recording.recorder import wall_ns
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

failed_loads = versions.failed_loads()


class Over(NamedTuple):
    """Requests whose load may be closed, and those whose promised saves may be."""

    loads: list[str]
    saves: set[str]


class OutputView:
    """Shows the output to one child after the other.

    Args:
        children: all children.
        ledger: holds the loads and saves.
        visibility: the requests hidden from each child.
        stray: receives reports about transfers that the child does not own.

    Attributes:
        is_watched: whether any child looks at the output: if none does, one without loads and saves need not be shown.
    """

    def __init__(
        self,
        children: Sequence[Child],
        ledger: Ledger,
        visibility: Sequence[Visibility],
        stray: Callable[[Stray], None],
    ) -> None:
        self._shown_to = [child for child in children if child.does("update_connector_output")]
        self.is_watched = bool(self._shown_to)
        self._ledger = ledger
        self._visibility = visibility
        self._stray = stray
        self._classes = {child.name: class_path(type(child.connector)) for child in children}

    def show(
        self,
        output: KVConnectorOutput,
        meta: MultiKVConnectorWorkerMetadata | None,
        loads: Sequence[str],
        sent: set[str],
    ) -> Over:
        """Show the output with these loads and saves; return those that have ended after all children have seen it.

        ``finished_recving`` and ``finished_sending`` of the output are left to the caller.
        """
        # A synchronous load ends with its step: vLLM reports it to nobody.
        received = {request for request in loads if self._ledger.is_async(request)}
        sync = [request for request in loads if request not in received]
        events, stats = output.kv_cache_events, output.kv_connector_stats
        try:
            for child in self._shown_to:
                output.kv_connector_worker_meta = meta.metadata[child.index] if meta is not None else None
                output.kv_cache_events = events.by_child.get(child.index) if isinstance(events, MultiKVEvents) else None
                own = None if stats is None else own_stats(stats, child.name, self._classes[child.name])
                output.kv_connector_stats = own
                received, sent = self._show_one(child, output, received, sent)
                if (left := output.kv_connector_stats) is not own:
                    stats = with_own_stats(stats, child.name, left, self._classes)
        finally:
            output.kv_connector_worker_meta, output.kv_cache_events, output.kv_connector_stats = meta, events, stats
        return Over([*sync, *received], sent)

    def _show_one(self, child: Child, output: Any, received: set[str], sent: set[str]) -> tuple[set[str], set[str]]:
        """Show the output to one child; return both sets with its changes of its own requests.

        As with vLLM's router they are the sets that it was shown, or has put there: a copy may have another order.
        """
        hidden = self._visibility[child.index].hidden
        now_received, now_sent = set(received), set(sent)
        seen_received, seen_sent = now_received - hidden, now_sent - hidden
        if hidden:
            received, sent = set(seen_received), set(seen_sent)
        # As in vLLM an empty set is None if it was None before.
        output.finished_recving = received if received or output.finished_recving is not None else None
        output.finished_sending = sent if sent or output.finished_sending is not None else None
        failed = set(failed_loads(output))
        child.update_connector_output(output)
        received, sent = output.finished_recving or set(), output.finished_sending or set()
        if added := set(failed_loads(output)) - failed:
            output.failed_recving = failed  # vLLM has read it already, and does not read it again
            self._add_failures(child.index, added, now_received)
            received = received - added
        if received != seen_received:
            self._change_loads(child.index, seen_received, received, now_received)
        if sent != seen_sent:
            self._change_saves(child.index, seen_sent, sent, now_sent)
        return in_order_of(received, now_received), in_order_of(sent, now_sent)

    def _add_failures(self, child: int, added: set[str], received: set[str]) -> None:
        """Fail the loads that the child reports as failed; the workers report them to vLLM in the next step."""
        for request in added:
            load = self._ledger.load(request)
            if load is not None and load.child == child and load.is_async:
                received.discard(request)
                self._ledger.fail(request, wall_ns())
            else:
                self._stray(Stray(child, "failure", request))

    def _change_loads(self, child: int, seen: set[str], now: set[str], received: set[str]) -> None:
        for request in seen - now:
            load = self._ledger.load(request)
            if load is not None and load.child == child:
                received.discard(request)
        for request in now - seen:
            is_in = self._ledger.complete_load(request, child, wall_ns())
            if is_in is None:
                self._stray(Stray(child, "load", request))
            elif is_in:
                received.add(request)

    def _change_saves(self, child: int, seen: set[str], now: set[str], sent: set[str]) -> None:
        for request in seen - now:
            if self._ledger.reopen_save(request, child):
                sent.discard(request)
        for request in now - seen:
            are_all_in = self._ledger.complete_save(request, child, wall_ns())
            if are_all_in is None:
                self._stray(Stray(child, "save", request))
            elif are_all_in:
                sent.add(request)


def in_order_of(shown: set[str], requests: set[str]) -> set[str]:
    """Return ``requests``: ``shown`` itself if it has the same, else a set made in its order."""
    if shown == requests:
        return shown
    return set([request for request in shown if request in requests] + list(requests - shown))
