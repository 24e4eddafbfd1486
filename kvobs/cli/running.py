"""Look at running servers, and at the Prometheus that scrapes them: metrics, exemplars, doubled series, rules, jobs."""

import datetime as dt
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvobs.cli import dashboards
from kvobs.cli.scrapes import NO_METRICS, PLAIN, EndedError, parse_vllm, values_of
from kvobs.cli.web import NO_PROMETHEUS, NoAnswerError, get, query_prometheus
from kvobs.export.connector_rows import ConnectorRow, server_row
from kvobs.export.numbers import PREFIX, Numbers, Scrape
from kvobs.export.texts import duration, printable, signed_amount
from kvobs.schema import signals
from kvobs.schema.findings import Finding
from kvobs.schema.signals import no_estimate
from kvobs.schema.verdicts import (
    ALERTS,
    CORRUPT,
    FAILING,
    HANGS,
    QUARANTINED,
    SEVERITIES,
    SLOW,
    THRASHING,
    UNSERVED,
    Severity,
)

OPENMETRICS = "application/openmetrics-text"
_SERIES = re.compile(rf"^({PREFIX}\w+(?:\{{.*?\}})?) \S+(?: \d+)?$", re.MULTILINE)
_RULE = re.compile(r"^\s*-?\s*(?:alert|record):\s*(\S+)", re.MULTILINE)
_HISTOGRAM = signals.LOAD_DURATION.name + "_bucket"
_DOUBLED = f"count by (instance, engine, model_name) ({signals.BUILD_INFO.name}) > 1"
_BUCKETLESS = f"group by (job) ({signals.LOOKUPS.name}) unless group by (job) ({signals.CALL_DURATION.name}_bucket)"
_STATES = {
    CORRUPT.name: "loaded {:,.0f} blocks with wrong bytes since the engine's start",
    QUARANTINED.name: "is in quarantine: new requests are served without it",
    FAILING.name: "fails: {:.0%} of its loads, exceptions included, since the engine's start",
    SLOW.name: "is slow: since the engine's start the p99 of its loads is {:.3g} s",
    THRASHING.name: "thrashes: since the engine's start prompts asked again for {:.0%} of what it evicted, and it "
    "loaded less than that",
    UNSERVED.name: "never serves: nothing was loaded from it since the engine's start, although prompts repeat after "
    "vLLM's own cache has evicted them",
}
"""By a connector's state: what is reported about it."""


_PROMETHEUS = "give the address of a Prometheus, such as http://localhost:9090"
_FIXES = {
    NO_METRICS: "give the exporter's address",
    EndedError: "see KvobsEngineEnded in the runbook, and `kvobs timeline` on that machine for the last calls; after "
    "SIGKILL look for the out-of-memory killer: `dmesg`, or the pod's last state",
}
"""By the text or the class of an error."""
_JOBS = {
    "kvobs": "add a job of this name for kvobs's exporter, or without one for vLLM's /metrics/, with the slash",
    "vllm": "add a job of this name for vLLM's /metrics",
}
"""The jobs that boards and alerts select, and how to add one."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that fires, with its labels; ``since`` is when its condition became true, in seconds since 1970."""

    name: str
    severity: str
    connector: str
    instance: str
    since: float

    @classmethod
    def of(cls, name: str, fired: Mapping[str, Any]) -> "Alert":
        """Return an alert from Prometheus's list of its rules."""
        labels = {label: printable(str(value)) for label, value in fired.get("labels", {}).items()}
        since = dt.datetime.fromisoformat(str(fired["activeAt"])).timestamp()
        severity, connector, instance = (labels.get(label, "") for label in ("severity", "connector", "instance"))
        return cls(name, severity, connector, instance, since)

    def __str__(self) -> str:
        """Return a line with the labels that it has, by this machine's clock."""
        of = f" of connector {self.connector}" if self.connector else ""
        at = f" at {self.instance}" if self.instance else ""
        begun = dt.datetime.fromtimestamp(self.since).astimezone()
        ago = duration(max(0.0, time.time() - self.since))
        return f"{self.name} ({self.severity or 'no severity'}){of}{at}, since {begun:%Y-%m-%d %H:%M:%S} ({ago} ago)"


@dataclass(slots=True)
class LiveResult:
    """The facts by address, the findings, and the alerts that fire. ``mistakes`` are problems, whoever made them."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    mistakes: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    unknown: tuple[Finding, ...] = ()

    def warn(self, path: str, found: str, fix: str) -> None:
        self.warnings.append(Finding(path, found, fix=fix))

    def refuse(self, path: str, found: str, fix: str) -> None:
        self.mistakes.append(Finding(path, found, fix=fix))


def look(urls: Sequence[str], prometheus: str | None = None) -> LiveResult:
    """Look at the metrics at these URLs, and at a Prometheus if its address is given."""
    result = LiveResult()
    engines = Counter(engine for url in urls for engine in _look_at_server(result, url))
    for (model, engine), times in engines.items():
        if times > 1:
            found = f"found engine {engine} of {model} at {times} of these addresses: each of its numbers counts twice"
            result.warn("--server", found, "give only one of them, unless they belong to different servers")
    if prometheus is not None:
        where = prometheus.rstrip("/")
        try:
            _look_at_prometheus(result, where, urls)
        except NoAnswerError as error:
            result.refuse(where, str(error), _PROMETHEUS)
        except (AttributeError, LookupError, TypeError, ValueError):  # its answers have another form
            result.refuse(where, NO_PROMETHEUS, _PROMETHEUS)
    return result


def _look_at_server(result: LiveResult, url: str) -> set[tuple[str, str]]:
    """Note the facts about a server; return model and engine of each engine there."""
    try:
        text = get(url, PLAIN).text
        values = values_of(text)
        exemplars = _exemplars(url)
    except NoAnswerError as error:
        fix = _FIXES.get(str(error)) or _FIXES.get(type(error), "check that the server runs at this address")
        result.refuse(url, str(error), fix)
        return set()
    numbers = Numbers.of(values.items())
    series = Counter(_SERIES.findall(text))
    rows = server_row(url, None, Scrape(0.0, values, parse_vllm(text))).connectors
    builds, cores = (numbers.by_name.get(each.name, []) for each in (signals.BUILD_INFO, signals.LOCAL_CACHE_TOKENS))
    has_core = bool(cores) or not builds
    result.facts[url] = {
        "kvobs": numbers.label(signals.BUILD_INFO, "version") or "?",
        "vLLM": numbers.label(signals.BUILD_INFO, "vllm_version") or "?",
        "compiled probe": numbers.label(signals.BUILD_INFO, "native") or "?",
        "connectors": ", ".join(sorted(f"{row.connector} ({row.state})" for row in rows)) or "none yet",
        "loads": ", ".join(f"{row.connector} {_durations(row)}" for row in rows if row.load_p99_s) or "none yet",
        "gain": ", ".join(f"{row.connector} {_gain(row)}" for row in rows if row.loads_per_s) or "no loads yet",
        **({} if has_core else {"EngineCore": "on another host, whose exporter has its numbers"}),
        "series of kvobs": f"{series.total():,}",
        "exemplars": "no OpenMetrics here" if exemplars is None else f"{exemplars:,}",
    }
    if exemplars is None:
        fix = "use the exporter; or scrape /metrics/, with the slash, of vLLM's server"
        result.warn(url, "serves no OpenMetrics here, so there are no exemplars", fix)
    elif not exemplars and signals.SPANS_QUEUED.name in numbers.by_name:  # its exporter exports spans
        fix = "exemplars come with the first traced load; if loads have ended, check that requests are sampled"
        result.warn(url, "exports spans, but has no exemplars", fix)
    if doubled := [name for name, times in series.items() if times > 1]:
        found = f"serves {len(doubled)} series more than once, such as {printable(doubled[0])[:200]}"
        result.refuse(url, found, "report it: Prometheus refuses such an answer")
    for row in rows:
        if row.state == HANGS.name:
            where = f" in {row.call}" if row.state_by == "call" else ""
            found = f"connector {row.connector} hangs: {row.state_by}{where} for {row.state_value:.0f} s"
            result.refuse(url, printable(found), "see KvobsCallHangs and KvobsLoadUnfinished in the runbook")
        elif row.state in _STATES:
            note = result.warn if SEVERITIES[row.state] is Severity.WARNING else result.refuse
            mean = f", their mean {row.load_mean_s:.3g} s" if row.state == SLOW.name and row.load_mean_s else ""
            found = f"connector {row.connector} {_STATES[row.state].format(row.state_value)}{mean}"
            note(url, printable(found), f"see {ALERTS[row.state_by]} in the runbook")
    if lost := numbers.total(signals.INTERNAL_ERRORS):
        found = (
            f"{signals.INTERNAL_ERRORS.name} is {lost:,.0f}: measurements of kvobs were lost, serving is not affected"
        )
        result.warn(url, found, "look for 'kvobs' in the log")
    return {(labels.get("model_name", "?"), labels.get("engine", "?")) for labels, _ in cores}


def _durations(row: ConnectorRow) -> str:
    """Return a connector's durations of loads since the engine's start."""
    p50, p99, mean = map(duration, (row.load_p50_s, row.load_p99_s, row.load_mean_s))
    return f"(p50 {p50}, p99 {p99}, mean {mean})"


def _gain(row: ConnectorRow) -> str:
    """Return the time that a connector's loads saved, less the waits, since the engine's start."""
    if row.gain_s_per_s is None:
        return f"({no_estimate(row.prefills_seen)})"
    return f"({signed_amount(row.gain_s_per_s)} s by {row.estimated_loads_per_s:,.0f} of {row.loads_per_s:,.0f} loads)"


def _exemplars(url: str) -> int | None:
    """Return how many exemplars of kvobs a server has; None if it serves no OpenMetrics."""
    text, content_type = get(url, OPENMETRICS)
    if not content_type.startswith(OPENMETRICS) and url.endswith("/metrics"):
        with suppress(NoAnswerError):
            text, content_type = get(f"{url}/", OPENMETRICS)  # where vLLM's API server has it
    if not content_type.startswith(OPENMETRICS):
        return None
    return sum(line.startswith(PREFIX) and " # {" in line for line in text.splitlines())


def _look_at_prometheus(result: LiveResult, prometheus: str, urls: Sequence[str]) -> None:
    now = time.time()
    targets = query_prometheus(prometheus, "targets", state="active")["activeTargets"]
    groups = query_prometheus(prometheus, "rules")["groups"]
    flags = query_prometheus(prometheus, "status/flags")
    doubled, bucketless = (
        query_prometheus(prometheus, "query", query=query)["result"] for query in (_DOUBLED, _BUCKETLESS)
    )
    hour = {"start": f"{now - 3600:.0f}", "end": f"{now:.0f}"}
    stored = query_prometheus(prometheus, "query_exemplars", query=_HISTOGRAM, **hour)
    facts = result.facts[prometheus] = {}
    _look_at_rules(result, prometheus, facts, groups)
    _look_at_jobs(result, prometheus, facts, targets, urls)
    facts["exemplars of the last hour"] = f"{sum(len(series.get('exemplars', ())) for series in stored):,}"
    if "exemplar-storage" not in str(flags.get("enable-feature", "")):
        result.warn(prometheus, "stores no exemplars", "start it with --enable-feature=exemplar-storage")
    for series in doubled:
        labels = series["metric"]
        engine = f"engine {labels.get('engine', '?')} of {labels.get('instance', '?')}"
        found = f"has kvobs's metrics of {engine} {series['value'][1]} times: sums, and alerts, are doubled"
        fix = "scrape kvobs_.* in one job only: drop it in the others with metric_relabel_configs"
        result.refuse(prometheus, printable(found), fix)
    for series in bucketless:
        found = (
            f"has no buckets of kvobs's histograms of job {series['metric'].get('job', '?')!r}: durations are missing"
        )
        fix = "set always_scrape_classic_histograms: true in this job, and drop no series named *_bucket"
        result.refuse(prometheus, printable(found), fix)


def _look_at_rules(result: LiveResult, where: str, facts: dict[str, str], groups: Sequence[Mapping[str, Any]]) -> None:
    rules = {rule["name"]: rule for group in groups for rule in group.get("rules", ())}
    shipped = shipped_rules()
    missing = sorted(shipped - rules.keys())
    loaded = {name: rules[name] for name in sorted(shipped & rules.keys())}
    facts["rules of kvobs"] = f"{len(loaded)} of {len(shipped)}"
    firing = [name for name, rule in loaded.items() if rule.get("state") == "firing"]
    facts["alerts that fire"] = ", ".join(firing) or "none"
    fired = [(name, each) for name in firing for each in loaded[name].get("alerts", ())]
    with suppress(KeyError, TypeError, ValueError, AttributeError):  # not as Prometheus's API has it
        result.alerts += sorted(
            (Alert.of(name, each) for name, each in fired if each["state"] == "firing"), key=lambda alert: alert.since
        )
    if missing:
        found = f"has not loaded {len(missing)} of kvobs's {len(shipped)} rules and alerts, such as {missing[0]}"
        result.warn(where, found, "kvobs dashboards export DIR, and name DIR/rules/*.yml in rule_files")
    for name, rule in loaded.items():
        if error := rule.get("lastError"):
            found = f"can't evaluate {name}: {printable(str(error))[:200]}"
            result.refuse(where, found, "correct what the error names; do two jobs have the same series?")


def shipped_rules() -> set[str]:
    """Return the names of the rules and alerts that come with this kvobs."""
    files = [text for path, text in dashboards.contents().items() if path.startswith("rules/")]
    return {name for text in files for name in _RULE.findall(text.decode())}


def _look_at_jobs(
    result: LiveResult, where: str, facts: dict[str, str], targets: Sequence[Mapping[str, Any]], urls: Sequence[str]
) -> None:
    jobs: dict[str, list[Mapping[str, Any]]] = {}
    for target in targets:
        jobs.setdefault(target.get("labels", {}).get("job", "?"), []).append(target)
    ups = {job: sum(target.get("health") == "up" for target in members) for job, members in jobs.items()}
    facts["jobs"] = ", ".join(f"{job} ({ups[job]} of {len(members)} up)" for job, members in sorted(jobs.items()))
    for name, fix in _JOBS.items():
        if name not in jobs:
            found = f"has no job {name!r}, which kvobs's boards and alerts select"
            result.warn(where, found, fix)
        for target in jobs.get(name, ()):
            if target.get("health") == "down":  # it may be unknown until the first scrape
                error = printable(str(target.get("lastError") or "down"))[:200]
                found = f"can't scrape {printable(str(target.get('scrapeUrl')))} of job {name!r}: {error}"
                result.refuse(where, found, "correct the target, or start the server there")
    scraped = {_port(str(target.get("scrapeUrl"))) for target in targets}
    for url in urls:
        if _port(url) not in scraped:
            fix = "add it to the targets of the job 'kvobs'"
            result.warn(where, f"scrapes no target at the port of {url}", fix)


def _port(url: str) -> int:
    """Return the port of an URL; host names may differ where Prometheus runs."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
