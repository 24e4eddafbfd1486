"""Report each finished request: to the client in ``kv_transfer_params``, and to the request log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvobs.faults import contained
from kvobs.state.events import ObservedRequest, Params
from kvobs.state.request_report import RequestReport
from kvobs.state.transfers import Gain, Load, LookupResult, Save, WrongBlocks
from kvobs.telemetry.events import TelemetryObserver
from kvobs.telemetry.tracing.trace_context import ID_AT_MOST, REPORT, field_of, into_params

ASKED = "asked"
"""In a report, whether the client asked for it. A report forwarded by a prefill engine counts as asking for one."""
LIVE_AT_MOST = 1 << 16
ENDING_AT_MOST = 256


def asks(params: object) -> bool:
    """Return whether a client's ``kv_transfer_params`` ask for a report; malformed ones do not."""
    report = field_of(params, REPORT)
    return report is True or (isinstance(report, Mapping) and report.get(ASKED) is True)


class Reports(TelemetryObserver):
    """Gathers the reports of live requests: of those only that somebody is to see.

    ``report`` is the option of this name: whether a client that asks gets a report. ``put`` takes the
    fields of each finished request's line, for the request log; ``engine`` is vLLM's index of this engine, for the log.
    """

    def __init__(
        self,
        names: Sequence[str],
        report: bool,
        put: Callable[[Mapping[str, Any]], None] | None = None,
        engine: int = 0,
    ) -> None:
        self._put_line = put
        self._names = names
        self._report = report
        self._about = {"engine": engine, "pid": os.getpid()}
        self._live: dict[str, RequestReport] = {}
        # Finished requests whose last step loaded: the line is put when the output of that step has been read.
        self._ending: dict[str, tuple[dict[str, Any], RequestReport, Load]] = {}

    def __len__(self) -> int:
        return len(self._live) + len(self._ending)

    def _answers(self, params: object) -> bool:
        """Return whether the response to a request with these params has a report."""
        return self._report and asks(params)

    @contained("record")
    def finished(self, request: ObservedRequest, params: Params | None) -> Params | None:
        """Return the params for the client of a request that has finished; before its ``request_ended``."""
        answers = self._answers(request.kv_transfer_params)
        if not answers and self._put_line is None:
            return params
        report = self._live.get(request.request_id) or RequestReport(request.num_prompt_tokens)
        if self._put_line is not None:
            self._log(request, report)
        if not answers:
            return params
        return into_params(params, REPORT, {ASKED: True, **report.rendered(self._names)})

    def _log(self, request: ObservedRequest, report: RequestReport) -> None:
        head = {
            "time": round(time.time(), 3),
            **self._about,
            "request_id": request.request_id[:ID_AT_MOST],
            "finish_reason": str(request.get_finished_reason()),
        }
        if (load := report.awaits) is None:
            self._put(head, report)
            return
        if len(self._ending) >= ENDING_AT_MOST or request.request_id in self._ending:
            self._put_ending(request.request_id if request.request_id in self._ending else next(iter(self._ending)))
        self._ending[request.request_id] = head, report, load

    def _put(self, head: Mapping[str, Any], report: RequestReport) -> None:
        if self._put_line is not None:
            self._put_line({**head, **report.rendered(self._names)})

    def _put_ending(self, request_id: str) -> None:
        head, report, _ = self._ending.pop(request_id)
        self._put(head, report)

    def looked_up(self, request: ObservedRequest, began_ns: int, ended_ns: int) -> None:
        report = self._live.get(request.request_id)
        if report is None:
            is_seen = self._put_line is not None or self._answers(request.kv_transfer_params)
            if not is_seen or len(self._live) >= LIVE_AT_MOST:
                return
            report = self._live[request.request_id] = RequestReport(request.num_prompt_tokens)
        report.looked_up(began_ns, ended_ns)

    def reused(self, request_id: str, tokens: int) -> None:
        if (report := self._live.get(request_id)) is not None:
            report.seen_tokens = tokens

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        if (report := self._live.get(request.request_id)) is not None:
            report.allocated([offer[:2] for offer in lookup.offers], lookup.local)

    def admitted(self, request_id: str, load: Load) -> None:
        if (report := self._live.get(request_id)) is not None:
            report.admitted(load)

    def load_ended(self, request_id: str, load: Load) -> None:
        if (report := self._of(request_id, load)) is not None:
            report.load_ended(load)

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        if (report := self._of(request_id, load)) is None:
            return
        report.load_weighed(load, gain)
        if self._is_ending(request_id, load):
            self._put_ending(request_id)

    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        if (report := self._live.get(request_id)) is not None:
            report.aborted(load, by_error=by_error)

    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        if (report := self._live.get(request_id)) is not None:
            report.promised((*promised, *early))

    def noted(self, notes: Sequence[Any]) -> None:
        for note in notes:
            if isinstance(note, WrongBlocks) and (report := self._live.get(note.request)) is not None:
                report.got_wrong_blocks(note.connector_index, note.blocks)

    def request_ended(self, request: ObservedRequest) -> None:
        self._live.pop(request.request_id, None)

    def _of(self, request_id: str, load: Load) -> RequestReport | None:
        """Return the report of the request with this load: of an ended one, or of a live one with the same id."""
        return self._ending[request_id][1] if self._is_ending(request_id, load) else self._live.get(request_id)

    def _is_ending(self, request_id: str, load: Load) -> bool:
        return request_id in self._ending and self._ending[request_id][2] is load
