"""Make the tables of the documentation from the tables of the code; cog puts them into the pages."""

from __future__ import annotations

import json
import re
from math import ceil
from typing import Any, get_args

from pydantic import BaseModel

from dashboards.alerts import ALERTS
from dashboards.site import Site
from docs.deviations import DEVIATIONS
from docs.pages import ROOT, table
from kvobs.cli.summary.rows import MEASURES
from kvobs.export.connector_columns import MEANINGS
from kvobs.schema.options import Options
from kvobs.schema.signals import CALL_DURATION, SIGNALS, Kind
from kvobs.schema.spans import ATTRIBUTES, SPANS
from kvobs.schema.verdicts import STATES, UNSERVED_H
from kvobs.telemetry.transfers.peers import ADDRESSES, ENGINE
from kvobs.vllm_api.hooks import HOOKS, Cadence, Combine, Side
from tests.suites import SUITES

SIDES = {
    Side.CONFIG: "any process, on the class",
    Side.SCHEDULER: "scheduler",
    Side.WORKER: "worker",
    Side.BOTH: "scheduler and worker",
}
CADENCES = {
    Cadence.ONCE: "once, or on demand",
    Cadence.REQUEST: "per request",
    Cadence.STEP: "per step",
    Cadence.LAYER: "per layer",
}
COMBINED = {
    Combine.EACH: "every connector is called",
    Combine.GUARDED: "every connector is called, even after one has raised",
    Combine.ANY: "true if it is for one connector",
    Combine.ALL: "true if it is for every connector",
    Combine.CHAIN: "all connectors' items, one after the other",
    Combine.ROUTED: "a special rule",
}

CONDITIONS = {
    "EngineEnded": "an engine ended unexpectedly",
    "CallHangs": "an engine has been in one call into a connector for more than {call_age_s s}",
    "RequestsNotResumed": "a loaded request has waited for more than {load_age_s s}, and no step computes anything",
    "EnginesFailingRequests": "more than {failed_share %} of a connector's loads fail, and their requests with them, "
    "on more than {failing_engines %} of a cluster's loading engines, and on at least {few_failing_engines}",
    "RequestsFailing": "as `KvobsConnectorFailing`, and the requests fail (`kv_load_failure_policy` `fail`)",
    "FailedSyncLoads": "a synchronous load failed: other connectors may have saved its blocks",
    "LoadsHideFailures": "NIXL or Mooncake counts failures, and no load has failed in 15 minutes",
    "CorruptLoads": "a loaded block has other bytes than were computed",
    "StuckTransfers": "a rank has not reported loads or saves that other ranks have finished",
    "LoadUnfinished": "a load has been in progress for more than {load_age_s s}",
    "EnginesFailing": "as `KvobsEnginesFailingRequests`, but the tokens are recomputed",
    "ConnectorFailing": "more than {failed_share %} of a connector's loads fail, at least {few_failed} in 15 minutes; "
    "or all of at least 3 loads in 6 hours",
    "ConnectorBlocksEngine": "calls into a connector took more than {blocked_share %} of the scheduler's last 90 s",
    "ConnectorBlocksScheduler": "calls into a connector take more than {scheduler_share %} of the scheduler's time",
    "LookupUnanswered": "a connector has answered a lookup 'not yet' for more than {lookup_age_s s}",
    "ConnectorQuarantined": "a best-effort connector was in quarantine for most of the last 5 minutes",
    "ConnectorErrors": "a connector raised an exception",
    "LoadsSlow": "most loads of 2 minutes, or 1 in 100 for 10 of 15 minutes, take more than {slow_load_s s} and "
    "{slow_load_s_per_1k_tokens s} per 1000 tokens; at least {few_loads} loads in 5 minutes",
    "LoadsSlowed": "loads take more than {slowed_times} times as long per token as a day ago, and more than 0.1 s; "
    "at least {few_loads} loads in 5 minutes",
    "LoadsBelowLink": "loads use less than {link_share %} of a connector's links (`link_gbps`); at least "
    "{few_transfers} loads in 15 minutes",
    "SaveBacklog": "a promised save has held blocks for more than {save_age_s s}",
    "KvEventsStopped": "a connector that sent KV cache events finished at least {few_transfers} saves in 15 minutes "
    "without an event of a stored block",
    "SlowestRank": "one rank is the slowest more often than its fair share, by more than {rank_lead %} of the "
    "transfers and by {rank_skew_s s} on average; at least {few_transfers} transfers in 15 minutes",
    "LoadsDontPay": "more than {slower_share %} of a connector's loads take longer than computing; at least "
    "{few_loads} loads in 5 minutes",
    "StoreTooSmall": "prompts ask again for more than {thrash_share %} of the tokens that a connector evicts; at least "
    "{few_tokens} evicted tokens a second; not with several media",
    "UnusedHitTokens": "more than {unused_hit_share %} of the tokens that a connector offers are computed; at least "
    "{few_tokens} offered tokens a second",
    "NeverServes": f"nothing was loaded in {UNSERVED_H} hours from a connector that stores, while more than "
    "{loadable_share %} of the prompts' tokens, at least {few_tokens} a second, were used before and are no longer in "
    "vLLM's own cache",
    "JobMissing": "the job `kvobs` has no target, and no other job has the metrics",
    "ScrapedTwice": "more than one job scrapes an engine's metrics",
    "TelemetryMissing": "a target of the job `kvobs` is down or has no metrics of kvobs, or an exporter's engines "
    "are gone",
    "InternalErrors": "an internal error of kvobs's telemetry",
    "TelemetryDropping": "more than {spans_dropped} spans a second are lost",
    "TelemetryCost": "kvobs takes more than {self_share %} of a core in one process",
}
"""When each alert fires, in words, with the names and units of its thresholds in braces."""


def options() -> str:
    """Return the options with their defaults."""
    return table(["option", "default", "what it does"], _options(Options))


def _options(model: type[BaseModel], prefix: str = "") -> list[list[str]]:
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            rows += _options(type(field.default), f"{name}.")
            continue
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        rows.append([f"`{prefix}{name}`", f"`{json.dumps(default)}`", str(field.description)])
        for optional in get_args(field.annotation):  # off by default, with options of its own
            one = getattr(optional, "__origin__", optional)  # without its annotations
            if isinstance(one, type) and issubclass(one, BaseModel):
                rows += _options(one, f"{name}.")
    return rows


def metrics() -> str:
    """Return the metrics with their labels and the values of these, where there are few."""
    rows = []
    for signal in SIGNALS:
        labels = "; ".join(
            f"`{label}`" + (f": {', '.join(values)}" if values and values != CALL_DURATION.labels["hook"] else "")
            for label, values in signal.labels.items()
        )
        meaning = re.sub(r" \((?:tokens|bytes)\)(?=\.)", "", signal.help)  # the unit is in the name
        mark = " (histogram)" if signal.kind is Kind.HISTOGRAM else ""
        rows.append([f"`{signal.name}`{mark}", labels, meaning])
    return table(["metric", "further labels", "meaning"], rows)


def spans() -> str:
    """Return the kinds of spans."""
    rows = []
    for span in SPANS.values():
        subject = f" {{{span.subject.removeprefix('kv_transfer.')}}}" if span.subject else ""
        rows.append([f"`{span.name}{subject}`", span.process, span.covers])
    return table(["span", "process", "covers"], rows)


def attributes() -> str:
    """Return the attributes of spans."""
    return table(["attribute", "meaning"], [[f"`{name}`", meaning] for name, meaning in ATTRIBUTES.items()])


def hooks() -> str:
    """Return vLLM's hooks: who calls them, how often, and how the connectors' answers combine."""
    rows = [
        [f"`{hook.name}`", SIDES[hook.side], CADENCES[hook.cadence], COMBINED[hook.combine]] for hook in HOOKS.values()
    ]
    return table(["hook", "side", "called", "answers"], rows)


def deviations() -> str:
    """Return what connectors see differently from vLLM's own router."""
    rows = [[each.differs, each.why, each.unasked] for each in DEVIATIONS]
    return table(["what differs", "why", "if a connector acts without being chosen"], rows)


def states() -> str:
    return table(["state", "condition"], [[s.name, s.condition.format(**s.limits)] for s in STATES])


def top() -> str:
    """Return the meanings of the numbers on the screen of ``kvobs top``."""
    return table(["column", "meaning"], [[f"`{title}`", meaning] for title, meaning in MEANINGS.items()])


def summary() -> str:
    """Return the meanings of the rows of ``kvobs summary``, with their fields in JSON."""
    rows = [[f"`{each.title.strip()}`", f"`{each.field}`", each.meaning] for each in MEASURES]
    return table(["row", "in JSON", "meaning"], rows)


def alert_rules() -> str:
    """Return the alerts, each with a link to its section of the runbook."""
    rows = []
    for alert in ALERTS:
        condition = re.sub(
            r"\{(?P<name>\w+)(?: (?P<unit>\S+))?\}", _threshold, CONDITIONS[alert.name.removeprefix("Kvobs")]
        )
        link = f"[`{alert.name}`](../dashboards/runbook.md#{alert.name.lower()})"
        rows.append([link, str(alert.severity), condition, alert.hold, alert.keep])
    return table(["alert", "severity", "condition", "`for`", "`keep_firing_for`"], rows)


def _threshold(named: re.Match[str]) -> str:
    """Return a threshold's default with its unit and name."""
    name, unit = named["name"], named["unit"]
    value = getattr(Site(), name)
    shown = f"{100 * value:g} %" if unit == "%" else f"{value:g} {unit or ''}".strip()
    return f"{shown} (`{name}`)"


def versions() -> str:
    """Return what an engine of each vLLM version did with kvobs."""
    results = json.loads((ROOT / "tests/versions/results.json").read_text())
    rows = [
        [version, ", ".join(f"{loads} from `{name}`" for name, loads in served.items())]
        for version, served in results.items()
    ]
    return table(["vLLM", "loads in the demo"], rows)


def incidents() -> str:
    """Return what was seen of each incident, where, and after how many seconds."""
    results = json.loads((ROOT / "tests/incidents/results.json").read_text())
    places = {"log": "log", "top": "`kvobs top`", "check": "`kvobs check --server`", "overview": "Overview"}
    rows = []
    for title, seen in results.items():
        shown = [f"{text} ({ceil(s)} s)" if text else "-" for text, s in (seen["at"].get(p, ("", 0)) for p in places)]
        alerts = ", ".join(f"`{name}` ({seconds} s)" for name, seconds in seen["alerts"]) or "-"
        rows.append([title, *shown, alerts, seen["vllm"]])
    return table(["incident", *places.values(), "alerts", "vLLM's own metrics"], rows)


def gpu_path() -> str:
    """Return what came of each cell of vLLM's paths: right answers by scenario, kvobs's counts, and what was left."""
    results = json.loads((ROOT / "tests/gpu_path/results.json").read_text())
    columns = {
        "reuse and aborts": ("reuse",),
        "streams": ("streams",),
        "preemptions": ("preemptions",),
        "failed asynchronous loads": ("async failures",),
        "failed synchronous loads": ("sync failures", "raised"),
    }
    rows = []
    for cell in results.values():
        shown = {name: f"{n}/{of}" for name, (n, of) in cell["right"].items()}
        if cell["ended"]:
            shown[list(shown)[-1]] = f"engine ends ({cell['ended']})"
        lookups, loads, tokens = cell["counts"] or (0, 0, 0)
        same = "equal" if cell["equal"] else "NOT equal"
        counts = f"{lookups} lookups, {loads} loads, {tokens:,} tokens: {same}" if cell["counts"] else "-"
        answers = [" ".join(shown[name] for name in names if name in shown) or "-" for names in columns.values()]
        rows.append(
            [
                cell["path"],
                cell["connectors"],
                *answers,
                counts,
                "-" if cell["ended"] else str(cell["left"] or "nothing"),
            ]
        )
    return table(["path", "connectors", *columns, "kvobs's counts", "left over"], rows)


def gpu_path_servers() -> str:
    """Return what came of each server on vLLM's default path on GPUs."""
    results = json.loads((ROOT / "tests/gpu_path/servers/results.json").read_text())
    rows = []
    for server, seen in results.items():
        lookups, loads, tokens = seen["counts"]
        same = "equal" if seen["equal"] else "NOT equal"
        counts = f"{lookups} lookups, {loads} loads, {tokens:,} tokens: {same}"
        aborted = str(seen["requests"] - seen["answered"])
        left = ", ".join(seen["left"]) or "nothing"
        rows.append([server, f"{seen['right']}/{seen['answered']}", aborted, counts, left])
    return table(["server", "right answers", "aborted", "kvobs's counts", "left over"], rows)


def verified() -> str:
    """Return what verification found of each fault in a store."""
    rows = []
    for row in json.loads((ROOT / "tests/connectors/faults.json").read_text()).values():
        outcomes = row["outcomes"]
        count = sum(outcomes.get(name, 0) for name in ("lossy", "mismatch"))
        connector = f"`{row['connector']}`" + (f", {row['at']}" if row["at"] else "")
        wrong = "some" if row["wrong"] is None else str(row["wrong"])
        blamed = ", ".join(f"rank {rank}" for rank in row["ranks"]) or "-"
        blamed += f" ({row['seconds']} s)" if row["ranks"] and row["seconds"] else ""
        shown = ", ".join(f"{n} `{name}`" for name, n in outcomes.items()) or "none loaded"
        rows.append([connector, row["fault"], wrong, str(count), shown, blamed])
    return table(["connector", "fault in its store", "wrong blocks loaded", "found", "outcomes", "blamed"], rows)


def strangers() -> str:
    """Return how many answers were right of each pattern of strangers, with vLLM's router and with kvobs."""
    results = json.loads((ROOT / "tests/strangers/results.json").read_text())
    rows = [[row["what"], row["who"], _right(row["stock"]), _right(row["kvobs"])] for row in results.values()]
    return table(["a connector", "as", "right answers, vLLM's router", "with kvobs"], rows)


def _right(outcome: dict[str, Any]) -> str:
    end = f", the engine ends ({outcome['ended']})" if outcome["ended"] else ""
    return f"{outcome['right']} of {outcome['of']}{end}"


def listing(fault: str) -> str:
    """Return the source of a reproduction in ``tests/vllm_faults`` as a block of code."""
    return f"```python\n{(ROOT / 'tests' / 'vllm_faults' / f'{fault}.py').read_text(encoding='utf-8')}```"


def suites() -> str:
    rows = [[f"`{suite.name}`", suite.what, "yes" if suite.is_in_ci else "by name only"] for suite in SUITES]
    return table(["Suite", "What it runs", "In CI"], rows)


def peers() -> str:
    """Return the keys of params by which an engine is named, by the connectors whose they are."""
    named = [[names, f"`{host}`", f"`{port}`" if port else "in it"] for host, port, names in ADDRESSES if names]
    return table(
        ["connector", "key of its host", "key of its port"], [*named, ["others without these", f"`{ENGINE}`", ""]]
    )
