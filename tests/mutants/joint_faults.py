"""Seventy-one faults where parts of kvobs meet, each put into a copy of the tree: its own tests must find it.

    python -m tests.mutants.joint_faults [NAME ...]

No operator makes them: state that stays, another connector's value, an update that one path leaves out, an order that
is swapped. The first nine were planted in a review, and no test found them then. The last eighteen are in the putting
together, which the tests of each part do by themselves: they need tests through the built product.
"""

# ruff: noqa: E501 - lines of the code, whole

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".*", "__pycache__", "build", "node_modules")
LIMIT_S = 1800.0  # on a busy machine; alone the slowest takes a minute


class JointFault(NamedTuple):
    """One change of one file, and the tests of which one must fail: a file of them, or one of a slow file."""

    name: str
    file: str
    before: str
    after: str
    tests: str

    def planted_in(self, source: str) -> str:
        """Return the file's text with the fault."""
        return source.replace(self.before, self.after)


UNIT, ROUTING, EXPORT = "tests/unit", "kvobs/routing", "kvobs/export"
STRANGERS = "tests/strangers/test_patterns.py"
WIRING, RECORDERS, VERIFY = "kvobs/connector/wiring.py", "kvobs/telemetry/recorders.py", "kvobs/telemetry/verify"
PRODUCT, OPTIONS, VERIFIED = (f"{UNIT}/test_{name}.py" for name in ("product", "observed_options", "observed_verify"))
REQUESTS, TRACING, TRANSFERS, PAYLOAD = (
    f"kvobs/telemetry/{name}" for name in ("requests", "tracing", "transfers", "payload")
)

JOINT_FAULTS = (
    # survivors of a review
    JointFault(
        "names on a worker shift after a connector that was not built",
        f"{ROUTING}/worker_isolation.py",
        "        self._names = [connector.name for connector in connectors]\n",
        '        self._names = [connector.name for connector in connectors if not isinstance(connector.wrapped, Unbuilt)] + ["?"]\n',
        f"{UNIT}/routing/test_worker_isolation.py",
    ),
    JointFault(
        "each trace links to the first prefill",
        f"{TRACING}/request_traces.py",
        "            link=link,\n",
        '            link=link and self.__dict__.setdefault("_first_link", link),\n',
        f"{UNIT}/telemetry/tracing/test_request_traces.py",
    ),
    JointFault(
        "a call that raised stays in progress on the page",
        "kvobs/probe/pure.py",
        "                    failed(start, clock() - start, error, args[0] if args else None)\n                    raise\n",
        "                    failed(start, clock() - start, error, args[0] if args else None)\n"
        "                    latest = start\n                    raise\n",
        f"{UNIT}/probe/test_recorder.py",
    ),
    JointFault(
        "saves promised during a quarantine are never given up",
        f"{ROUTING}/isolation.py",
        "            if self.is_out(index) and all(index != other for _, other in self._reviews):\n",
        "            if False:\n",
        f"{UNIT}/routing/test_isolation.py",
    ),
    JointFault(
        "an exemplar has the trace of another record",
        f"{EXPORT}/span_reading.py",
        "                totals.mark(record, time.time())\n",
        "                totals.mark(record._replace(trace_id=taken[0][1][0].trace_id), time.time())\n",
        f"{UNIT}/export/test_span_reading.py::test_each_exemplar_has_the_trace_of_its_own_record",
    ),
    JointFault(
        "a load has lost what the last rank lost, not the worst",
        f"{ROUTING}/completions.py",
        "            load.lost_tokens = max(load.lost_tokens or 0, lost)\n",
        "            load.lost_tokens = lost\n",
        f"{UNIT}/routing/test_completions.py::test_the_greatest_loss_of_the_ranks_counts_in_any_order",
    ),
    JointFault(
        "a slow connector in quarantine is polled for open lookups",
        f"{ROUTING}/hook_targets.py",
        "self._open_lookups.poll(self.isolation.is_slow)",
        "self._open_lookups.poll(lambda _: False)",
        f"{UNIT}/routing/test_isolation_quarantine.py",
    ),
    JointFault(
        "a load that its connector fails on the scheduler's side is received, too",
        f"{ROUTING}/completions.py",
        "                received.discard(request)\n",
        "",
        f"{UNIT}/routing/test_completions.py::test_an_added_failure_comes_back_from_the_workers",
    ),
    JointFault(
        "the request log forgets a request whose id is used again",
        f"{REQUESTS}/request_reports.py",
        "        if len(self._ending) >= ENDING_AT_MOST or request.request_id in self._ending:\n",
        "        if len(self._ending) >= ENDING_AT_MOST:\n",
        f"{UNIT}/telemetry/requests/test_request_reports.py",
    ),
    # router and ledger
    JointFault(
        "the candidate of an earlier lookup stays after a miss",
        f"{ROUTING}/scheduler.py",
        "        self.ledger.propose(request.request_id, (best.connector_index, best.is_async) if best.tokens else None)\n",
        "        if best.tokens:\n            self.ledger.propose(request.request_id, (best.connector_index, best.is_async))\n",
        f"{UNIT}/routing/test_stock_faults.py",
    ),
    JointFault(
        "a request is released with its first save that was early",
        f"{ROUTING}/scheduler.py",
        "        if finished.early and not finished.holds:\n",
        "        if finished.early:\n",
        f"{UNIT}/routing/test_completions.py::test_an_early_save_releases_nothing_that_another_holds",
    ),
    JointFault(
        "the lookups of a request that ends during its load are never forgotten",
        f"{ROUTING}/scheduler.py",
        "        self.lookups.discard(request_id)\n",
        "        if finished.aborted is None:\n            self.lookups.discard(request_id)\n",
        "tests/transparency/test_lives.py::test_nothing_is_left_with_other_options",
    ),
    # scheduler's and workers' orders
    JointFault(
        "workers keep the blocks of a synchronous load that has ended",
        f"{ROUTING}/completions.py",
        "[request for request, _ in closed.loads]",
        "[request for request, load in closed.loads if load.is_async]",
        f"{UNIT}/routing/test_isolation_limits.py",
    ),
    JointFault(
        "workers keep a save that was given up",
        f"{ROUTING}/completions.py",
        "[(index, request) for request, index, _ in closed.saves]",
        "[(index, request) for request, index, save in closed.saves if not save.is_abandoned]",
        f"{UNIT}/routing/test_isolation.py",
    ),
    JointFault(
        "a load that ended before its request's end leaves an orphan",
        f"{ROUTING}/open_loads.py",
        "            self._orphaned.discard(request)\n",
        "",
        f"{UNIT}/routing/test_worker.py",
    ),
    JointFault(
        "the receipt of a request's second load is taken for the first one's",
        f"{ROUTING}/open_loads.py",
        "        self._returned.difference_update(orders.loads)\n",
        "",
        f"{UNIT}/routing/test_worker.py",
    ),
    JointFault(
        "a connector gets the ends of skipped steps in each step after them",
        f"{ROUTING}/worker_isolation.py",
        "self._unreported.pop(index, None)",
        "self._unreported.get(index)",
        f"{UNIT}/routing/test_isolation_quarantine.py",
    ),
    # visibility and isolation
    JointFault(
        "ended requests are forgotten before the workers get the hidden ones",
        f"{ROUTING}/hook_targets.py",
        "                if ends := visibility.ends_hidden(finished):\n"
        "                    hidden[index] = ends\n"
        "                visibility.forget(finished, self._ledger)\n",
        "                visibility.forget(finished, self._ledger)\n"
        "                if ends := visibility.ends_hidden(finished):\n"
        "                    hidden[index] = ends\n",
        f"{UNIT}/routing/test_isolation.py",
    ),
    JointFault(
        "a connector in quarantine goes on saving after it fails on a worker",
        f"{ROUTING}/isolation.py",
        "                self._withhold_all(index)  # the requests of that step are not known here\n",
        "                if not self.is_out(index):\n                    self._withhold_all(index)\n",
        f"{UNIT}/routing/test_isolation_quarantine.py",
    ),
    JointFault(
        "a request that was withheld or dropped is never forgotten",
        f"{ROUTING}/hook_targets.py",
        "                visibility.end(request_id)\n",
        "                if visibility.hidden:\n                    visibility.end(request_id)\n",
        f"{UNIT}/routing/test_isolation.py",
    ),
    JointFault(
        "the receipts hidden from the first connector are hidden from all",
        f"{ROUTING}/completions.py",
        "        hidden = self._visibility[connector.index].hidden\n",
        "        hidden = self._visibility[0].hidden\n",
        f"{UNIT}/routing/test_completions.py::test_hidden_requests_are_not_shown_and_end_all_the_same",
    ),
    # lookups, open ones, and the choice
    JointFault(
        "connectors get the allocation before their lookup is left open",
        f"{ROUTING}/hook_targets.py",
        "        self._open_lookups.leave_open(request, blocks, computed, left_open)\n"
        "        for connector in self._connectors:\n"
        "            is_shown = self._visibility[connector.index].allocates(request_id)\n"
        "            if is_shown and not self._open_lookups.has(connector.index, request_id):\n"
        "                self.isolation.allocated(connector.index, request_id)\n"
        "                yield connector\n",
        "        for connector in self._connectors:\n"
        "            is_shown = self._visibility[connector.index].allocates(request_id)\n"
        "            if is_shown and not self._open_lookups.has(connector.index, request_id):\n"
        "                self.isolation.allocated(connector.index, request_id)\n"
        "                yield connector\n"
        "        self._open_lookups.leave_open(request, blocks, computed, left_open)\n",
        f"{UNIT}/routing/test_lookups.py",
    ),
    JointFault(
        "the second allocation of a load settles its open lookups again",
        f"{ROUTING}/lookups.py",
        "asked.last, LookupResult(local=asked.last.local)",
        "asked.last, asked.last._replace(offers=())",
        f"{UNIT}/routing/test_lookups.py",
    ),
    # the aggregator and the ledger
    JointFault(
        "a request's next load fails as its first one did",
        "kvobs/aggregation/aggregator.py",
        "        for request in failed:\n            del self._failures[request]\n",
        "",
        f"{UNIT}/aggregation/test_aggregator.py",
    ),
    JointFault(
        "the aggregator's stuck failures are counted while ranks are still to report",
        f"{TRANSFERS}/open_transfers.py",
        "        if load is not None and load.is_in:\n",
        "        if load is not None:\n",
        f"{UNIT}/telemetry/transfers/test_open_transfers.py",
    ),
    # the pages and their readers
    JointFault(
        "a gauge is the sum of those of all processes",
        f"{EXPORT}/engine.py",
        "        total[gauges] = each[:, gauges].max(axis=0)\n",
        "",
        f"{UNIT}/export/test_engine.py",
    ),
    JointFault(
        "the numbers of a process that has gone are dropped",
        f"{EXPORT}/engine.py",
        "        pages = self.all()\n        gauges, calls",
        "        pages = [page for page in self.all() if page.is_alive] or list(self.all())\n        gauges, calls",
        f"{UNIT}/export/test_engine.py",
    ),
    JointFault(
        "what a reader counts itself is not in the numbers that it shows",
        f"{EXPORT}/totals.py",
        "            for slot, n in (*self._own.items(), (_VERSION",
        "            for slot, n in ((_VERSION",
        f"{UNIT}/export/test_totals.py",
    ),
    JointFault(
        "one connector's label values use up those of the others",
        "kvobs/page/rows.py",
        "        alike = sum(key[:2] == (signal, index) for key in self._at)\n",
        "        alike = sum(key[0] == signal for key in self._at)\n",
        f"{UNIT}/page/test_rows.py",
    ),
    JointFault(
        "of several processes one connector's label values use up those of the others",
        f"{EXPORT}/engine.py",
        "self._rows.setdefault((signal, index), {other})",
        "self._rows.setdefault((signal, 0), {other})",
        f"{UNIT}/export/test_engine_rows.py",
    ),
    JointFault(
        "a merged payload shares a connector's stats with the first one",
        f"{PAYLOAD}/stats.py",
        "                self.data[name] = copy.deepcopy(theirs)\n",
        "                self.data[name] = theirs\n",
        f"{UNIT}/telemetry/payload/test_stats.py",
    ),
    # the exporter and its watch
    JointFault(
        "a new exporter reads all spans again",
        f"{EXPORT}/engine.py",
        "            ordinary, urgent = self._before.get(name, ((0, 0), (0, 0)))\n",
        "            ordinary, urgent = (0, 0), (0, 0)\n",
        f"{UNIT}/export/test_engine.py",
    ),
    JointFault(
        "a process that goes on is still shown as stopped",
        f"{EXPORT}/engine_watch.py",
        "        self._stopped = {page.rank: self._stopped.get(page.rank, now) for page in running if page.is_stopped}\n",
        "        for page in running:\n            if page.is_stopped:\n                self._stopped.setdefault(page.rank, now)\n",
        f"{UNIT}/export/test_engine_watch.py::test_a_stopped_process_is_named_and_no_connector",
    ),
    # gauges and spans of a page
    JointFault(
        "a gauge is not set when a load ends",
        "kvobs/state/transfers.py",
        "            self.tokens -= self._held.pop(request, 0)\n            self.changes.add(self)\n",
        "            self.tokens -= self._held.pop(request, 0)\n",
        f"{UNIT}/test_observed_loads.py::test_the_gauges_are_right_after_each_event",
    ),
    JointFault(
        "after a client has left the gauges wait for the next step",
        f"{TRANSFERS}/open_transfers.py",
        "        if self.changes:\n            self.measure()\n",
        "",
        f"{UNIT}/test_observed_loads.py::test_the_gauges_are_right_after_each_event",
    ),
    JointFault(
        "slow and failed spans are written among the ordinary ones",
        f"{TRACING}/journal.py",
        "self._page.spans[URGENT if is_urgent else ORDINARY]",
        "self._page.spans[ORDINARY]",
        f"{UNIT}/telemetry/tracing/test_journal.py",
    ),
    JointFault(
        "a process writes so many spans in all, and not in each second",
        f"{TRACING}/journal.py",
        "return min(PER_SECOND, self._room + (self._clock() - self._since) * PER_SECOND)",
        "return self._room",
        f"{UNIT}/telemetry/tracing/test_journal.py",
    ),
    JointFault(
        "where nothing is traced a slow load in vain is lost",
        f"{TRACING}/urgent_loads.py",
        "        self._write(request.request_id)  # a load in vain\n",
        "        self._unweighed.pop(request.request_id, None)\n",
        f"{UNIT}/telemetry/tracing/test_urgent_loads.py",
    ),
    JointFault(
        "where nothing is traced slow and failed calls are not written",
        RECORDERS,
        "listener=tracer, page=page",
        "listener=tracer if tracing.is_on else None, page=page",
        f"{UNIT}/telemetry/tracing/test_urgent_loads.py",
    ),
    JointFault(
        "the estimate learns from each step by itself",
        "kvobs/telemetry/scheduler_telemetry.py",
        "        if self._is_last or now_ns - self._looked_ns >= EVERY_NS:\n",
        "        if now_ns:\n",
        f"{UNIT}/telemetry/test_scheduler_telemetry.py",
    ),
    JointFault(
        "what the estimate has seen at a burst's end waits for the next one",
        "kvobs/telemetry/scheduler_telemetry.py",
        "            self._is_last = not has_forward and bool(output.finished_req_ids)\n",
        "            self._is_last = False\n",
        f"{UNIT}/telemetry/test_scheduler_telemetry.py",
    ),
    # traces, reports and gains
    JointFault(
        "the load's span is lost when its request ends",
        f"{TRACING}/request_traces.py",
        "        self._write_load(request.request_id)\n        trace = self._traces.pop(request.request_id, None)\n",
        "        self._write_load(request_id)\n        self._loads.pop(request_id, None)\n"
        "        trace = self._traces.pop(request_id, None)\n",
        f"{UNIT}/telemetry/tracing/test_request_traces.py",
    ),
    JointFault(
        "a client gets the report without the trace",
        "kvobs/telemetry/scheduler_telemetry.py",
        "            params = reports.finished(request, params) or params\n",
        "            params = reports.finished(request, None) or params\n",
        f"{UNIT}/telemetry/requests/test_request_reports.py",
    ),
    JointFault(
        "a request that has ended waits for its resume",
        "kvobs/telemetry/estimates/gains.py",
        "        self._resuming.pop(request.request_id, None)\n",
        "        return\n",
        f"{UNIT}/telemetry/estimates/test_gains.py",
    ),
    # pauses, waits and block copies
    JointFault(
        "an isolated connector's back-off follows from the pauses, too",
        "kvobs/connectors/gate.py",
        "                self.on_slow(hook, ran)\n",
        "                self.on_slow(hook, spent)\n",
        f"{UNIT}/connectors/test_gate.py",
    ),
    JointFault(
        "a step that loads has waited for the earlier steps, too",
        "kvobs/probe/pure.py",
        "        self._before, steps, layers = now, ",
        "        self._before, steps, layers = now if is_waiting else self._before, ",
        f"{UNIT}/probe/test_layer_calls.py",
    ),
    JointFault(
        "a copy counts the first layer's bytes for each layer",
        "kvobs/connectors/block_copies.py",
        "        block = sum(cache.nbytes // cache.shape[dims[layer]] for layer, cache in caches[0].items())\n",
        "        layer, cache = next(iter(caches[0].items()))\n"
        "        block = len(caches[0]) * (cache.nbytes // cache.shape[dims[layer]])\n",
        f"{UNIT}/connectors/test_block_copies.py",
    ),
    JointFault(
        "a block from a prefill engine is compared with the fingerprint of any of its ranks",
        "kvobs/telemetry/verify/verifier.py",
        'block.sent.get(str(self._rank), "")',
        'next(iter(block.sent.values()), "")',
        f"{UNIT}/telemetry/verify/test_verifier.py",
    ),
    # names of the configuration
    JointFault(
        "a link's speed is looked for under the connector's class",
        WIRING,
        "                options.link_gbps.get(spec.name),\n",
        "                options.link_gbps.get(spec.connector_class.__name__),\n",
        PRODUCT,
    ),
    # strangers
    JointFault(
        "bad blocks in the load of another connector are dropped",
        f"{ROUTING}/open_loads.py",
        "            found.passed_on.update(hit)\n",
        "            if load.connector_index != index:\n                continue\n            found.passed_on.update(hit)\n",
        STRANGERS,
    ),
    JointFault(
        "a failure that another connector reports is taken for the load's end",
        "kvobs/state/ledger.py",
        "            if load is None or load.connector_index != index or load.is_async is is_sync:\n",
        "            if load is None or (load.connector_index != index and kind is not ReportKind.FAILED) or load.is_async is is_sync:\n",
        STRANGERS,
    ),
    JointFault(
        "hooks that were replaced after the constructor are not bound again",
        "kvobs/connector/__init__.py",
        "        changed = [connector.bind() for connector in self._sub_connectors]\n",
        "        changed: list[bool] = []\n",
        STRANGERS,
    ),
    JointFault(
        "methods beyond vLLM's class are not passed on",
        "kvobs/connector/__init__.py",
        '        connectors = vars(self).get("_sub_connectors", ())\n',
        "        connectors: Any = ()\n",
        STRANGERS,
    ),
    # the putting together
    JointFault(
        "the request log of each engine of a group says engine 0",
        RECORDERS,
        "put, versions.engine_position(vllm_config).number)",
        "put)",
        PRODUCT,
    ),
    JointFault(
        "the counts of offers do not know min_tokens",
        WIRING,
        "[options.min_tokens.get(name, 1) for name in names]",
        "[1 for name in names]",
        PRODUCT,
    ),
    JointFault(
        "peers are those of the first connector between engines",
        WIRING,
        "Peers(recorder, handed_over)",
        "Peers(recorder, handed_over[:1])",
        PRODUCT,
    ),
    JointFault(
        "an isolated connector's failure on the second rank is lost in the merge",
        f"{ROUTING}/metadata.py",
        "        self.broken |= other.broken\n",
        "",
        PRODUCT,
    ),
    JointFault(
        "isolated connectors are found by their place in the option",
        RECORDERS,
        "[i for i, name in enumerate(names) if name in options.best_effort]",
        "list(range(len(options.best_effort)))",
        PRODUCT,
    ),
    JointFault(
        "an idle engine is busy while another one of its group is",
        "kvobs/export/connector_rows.py",
        "vllm.sum(RUNNING, engine=engine) + vllm.sum(WAITING, engine=engine)",
        "vllm.sum(RUNNING) + vllm.sum(WAITING)",
        PRODUCT,
    ),
    JointFault(
        "a block that a load fills in part after a preemption is noted as computed",
        f"{VERIFY}/sample.py",
        "prompt.first, prompt.ids = start, []",
        "prompt.ids = []",
        VERIFIED,
    ),
    JointFault(
        "a load that was given up is compared",
        f"{ROUTING}/worker.py",
        "            self.observer.reported(None, ReportKind.FAILED, orders.failed)\n",
        "",
        VERIFIED,
    ),
    JointFault(
        "fingerprints without a trace beside them are a malformed trace",
        f"{TRACING}/trace_context.py",
        "for field in (TRACEPARENT, REPORT, BLOCKS)",
        "for field in (TRACEPARENT, REPORT)",
        VERIFIED,
    ),
    JointFault(
        "fingerprints stay for the next request of the same id",
        f"{VERIFY}/sample.py",
        "in (self._handed, self._unfilled,",
        "in (self._unfilled,",
        VERIFIED,
    ),
    JointFault(
        "isolated connectors are slow after slow_call_ms",
        WIRING,
        "int(options.best_effort_slow_ms * 1e6)",
        "int(options.slow_call_ms * 1e6)",
        OPTIONS,
    ),
    JointFault(
        "verify.on_mismatch is not handed over",
        WIRING,
        "refuses=configuration.options.verify.recomputes",
        "refuses=False",
        OPTIONS,
    ),
    JointFault(
        "the aggregator has its own stuck_after_s",
        "kvobs/connector/__init__.py",
        "stuck_after_s = configuration.options.stuck_after_s",
        "stuck_after_s = 60.0",
        OPTIONS,
    ),
    JointFault(
        "fingerprints are handed over if all connectors between engines produce",
        WIRING,
        "hands_over=any(spec.transfer_config.is_kv_producer",
        "hands_over=all(spec.transfer_config.is_kv_producer",
        VERIFIED,
    ),
    JointFault(
        "only the first connector has stats of its own",
        WIRING,
        "for connector in connectors if hook in connector.implemented]\n\n\ndef _verifier",
        "for connector in connectors if hook in connector.implemented][:1]\n\n\ndef _verifier",
        PRODUCT,
    ),
    JointFault(
        "the page of each engine of a group says engine 0",
        WIRING,
        "index=versions.engine_position(vllm_config).number",
        "index=0",
        PRODUCT,
    ),
    JointFault(
        "only the first process's spans are read",
        f"{EXPORT}/engine.py",
        "return [readers[ring].read() for readers in tuple(self._spans.values())]",
        "return [readers[ring].read() for readers in tuple(self._spans.values())[:1]]",
        PRODUCT,
    ),
    JointFault(
        "events of a connector that only the second rank has are lost in the merge",
        f"{ROUTING}/metadata.py",
        "                self.by_index[index] = container\n",
        "                continue\n",
        f"{UNIT}/test_observed.py::test_saved_tokens_are_counted_once_for_all_ranks",
    ),
)


def failing_test(tests: Iterable[str], fault: JointFault | None = None) -> str:
    """Run tests in a copy of the tree, with a fault or without one; return the first that fails, or nothing."""
    with TemporaryDirectory(prefix="kvobs-joints-") as folder:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        if fault:
            file = Path(folder, fault.file)
            file.write_text(fault.planted_in(file.read_text()))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:xdist", *tests]
        env = {**os.environ, "PYTHONPATH": folder}
        try:
            ran = subprocess.run(command, cwd=folder, env=env, check=False, stdout=PIPE, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"not done in {LIMIT_S:.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ran.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest's exit status {ran.returncode}" if ran.returncode else ""


def main(names: list[str]) -> int:
    """Put each fault into a copy of the tree, as many at a time as there are cores, and print which test finds it."""
    by_name = {fault.name: fault for fault in JOINT_FAULTS}
    chosen = [by_name[name] for name in names or by_name]
    if failing := failing_test(sorted({fault.tests for fault in chosen})):
        sys.exit(f"without a fault a test fails: {failing}")
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(failing_test, ([fault.tests] for fault in chosen), chosen)
        for fault, failing in zip(chosen, found, strict=True):
            missed += not failing
            print(f"{fault.name:<80}  {failing or 'missed'}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
