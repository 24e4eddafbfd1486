"""Look at running servers, and at the Prometheus that scrapes them: metrics, exemplars, doubled series, rules, jobs."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvobs import signals
from kvobs.cli import dashboards
from kvobs.cli.output import printable
from kvobs.cli.top.scrapes import PREFIX
from kvobs.cli.top.servers import NO_METRICS, PLAIN, values_of
from kvobs.cli.web import NoAnswerError, get
from kvobs.findings import Finding
from kvobs.stats.scrapes import Numbers

OPENMETRICS = "application/openmetrics-text"
_SERIES = re.compile(rf"^({PREFIX}\w+(?:\{{.*?\}})?) \S+(?: \d+)?$", re.MULTILINE)
_RULE = re.compile(r"^\s*-?\s*(?:alert|record):\s*(\S+)", re.MULTILINE)
_HISTOGRAM = signals.LOAD_DURATION.name + "_bucket"


@dataclass(slots=True)
class Looked:
    """What was seen: facts by server, and what is wrong."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    mistakes: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def look(urls: Sequence[str], prometheus: str | None = None) -> Looked:
    """Look at the metrics at these URLs, and at a Prometheus if its address is given."""
    looked = Looked()
    engines: Counter[tuple[str, str]] = Counter()
    for url in urls:
        engines.update(set(_look_at_server(looked, url)))
    for (model, engine), times in engines.items():
        if times > 1:
            found = (
                f"found engine {engine} of {model} at {times} of these addresses: each of its numbers is there twice"
            )
            looked.warnings.append(
                Finding("--server", found, fix="scrape one of them, unless they are different groups")
            )
    if prometheus is not None:
        _look_at_prometheus(looked, prometheus.rstrip("/"), urls)
    return looked


# A server


def _look_at_server(looked: Looked, url: str) -> Iterator[tuple[str, str]]:
    """Note what a server serves; yield model and engine of each engine there."""
    try:
        text = get(url, PLAIN).text
        values = values_of(text)
        exemplars = _exemplars(url)
    except NoAnswerError as error:
        fix = "give the exporter's address" if str(error) == NO_METRICS else "give the address of a running server"
        looked.mistakes.append(Finding(url, str(error), fix=fix))
        return
    numbers = Numbers.of(values.items())
    infos = numbers.by_name.get(signals.CONNECTOR_INFO.name, [])
    looked.facts[url] = {
        "kvobs": numbers.label(signals.BUILD_INFO, "version") or "?",
        "vLLM": numbers.label(signals.BUILD_INFO, "vllm_version") or "?",
        "connectors": ", ".join(sorted({has.get("connector", "?") for has, _ in infos})) or "none yet",
        "series of kvobs": f"{len(_SERIES.findall(text)):,}",
        "exemplars": "no OpenMetrics here" if exemplars is None else f"{exemplars:,}",
    }
    looked.warnings += _exemplar_warnings(url, exemplars)
    doubled = [series for series, times in Counter(_SERIES.findall(text)).items() if times > 1]
    if doubled:
        found = f"{len(doubled)} series are there twice, such as {printable(doubled[0])[:200]}"
        looked.mistakes.append(Finding(url, found, fix="report it: Prometheus refuses such an answer"))
    for signal, says, fix in _COUNTS:
        if total := numbers.total(signal):
            looked.warnings.append(Finding(url, f"{signal.name} is {total:,.0f}: {says}", fix=fix))
    for has, _ in numbers.by_name.get(signals.BUILD_INFO.name, []):
        yield has.get("model_name", "?"), has.get("engine", "?")


_COUNTS = (
    (
        signals.INTERNAL_ERRORS,
        "measurements of kvobs were lost, serving is not affected",
        "look for 'kvobs' in the log",
    ),
    (signals.QUARANTINED, "connectors are in quarantine now", "look at kvobs_call_errors_total and the log"),
)


def _exemplars(url: str) -> int | None:
    """Return how many exemplars of kvobs a server has; None if it serves no OpenMetrics."""
    text, content_type = get(url, OPENMETRICS)
    if not content_type.startswith(OPENMETRICS) and url.endswith("/metrics"):
        try:
            text, content_type = get(f"{url}/", OPENMETRICS)  # where vLLM's API server has it
        except NoAnswerError:
            return None
    if not content_type.startswith(OPENMETRICS):
        return None
    return sum(line.startswith(PREFIX) and " # {" in line for line in text.splitlines())


def _exemplar_warnings(url: str, exemplars: int | None) -> list[Finding]:
    if exemplars is None:
        fix = "use the exporter; or scrape /metrics/, with the slash, of vLLM's server"
        return [Finding(url, "serves no OpenMetrics here, so that there are no exemplars", fix=fix)]
    if not exemplars:
        fix = "if requests are traced: see 'Exemplars' in docs/tracing.md; there are none before the first traced load"
        return [Finding(url, "has no exemplars", fix=fix)]
    return []


# Prometheus


def _look_at_prometheus(looked: Looked, prometheus: str, urls: Sequence[str]) -> None:
    def ask(path: str, **query: str) -> Any:
        return _data(prometheus, path, query)

    try:
        targets = ask("targets", state="active")["activeTargets"]
        groups = ask("rules")["groups"]
        flags = ask("status/flags")
        doubled = ask("query", query=f"count by (instance, engine, model_name) ({signals.BUILD_INFO.name}) > 1")[
            "result"
        ]
        now = time.time()
        stored = ask("query_exemplars", query=_HISTOGRAM, start=f"{now - 3600:.0f}", end=f"{now:.0f}")
    except NoAnswerError as error:
        fix = "give the address of a Prometheus, such as http://localhost:9090"
        looked.mistakes.append(Finding(prometheus, str(error), fix=fix))
        return
    facts = looked.facts[prometheus] = {}
    _look_at_rules(looked, prometheus, facts, groups)
    _look_at_jobs(looked, prometheus, facts, targets, urls)
    facts["exemplars of the last hour"] = f"{sum(len(series.get('exemplars', ())) for series in stored):,}"
    if "exemplar-storage" not in str(flags.get("enable-feature", "")):
        fix = "start it with --enable-feature=exemplar-storage"
        looked.warnings.append(Finding(prometheus, "stores no exemplars", fix=fix))
    for series in doubled:
        has = series["metric"]
        engine = f"engine {has.get('engine', '?')} of {has.get('instance', '?')}"
        found = f"has kvobs's metrics of {engine} {series['value'][1]} times: sums, and alerts, are doubled"
        fix = "scrape kvobs_.* in one job only: see 'Scraping' in docs/metrics.md"
        looked.mistakes.append(Finding(prometheus, printable(found), fix=fix))


def _look_at_rules(looked: Looked, where: str, facts: dict[str, str], groups: Sequence[Mapping[str, Any]]) -> None:
    loaded = {rule["name"]: rule for group in groups for rule in group.get("rules", ())}
    shipped = shipped_rules()
    missing = sorted(shipped - loaded.keys())
    facts["rules of kvobs"] = f"{len(shipped) - len(missing)} of {len(shipped)}"
    firing = sorted(name for name in shipped & loaded.keys() if loaded[name].get("state") == "firing")
    facts["alerts that fire"] = ", ".join(firing) or "none"
    if missing:
        found = f"has not loaded {len(missing)} of kvobs's {len(shipped)} rules and alerts, such as {missing[0]}"
        fix = "kvobs dashboards export DIR, and name DIR/rules/*.yml in rule_files"
        looked.warnings.append(Finding(where, found, fix=fix))
    for name in sorted(shipped & loaded.keys()):
        if error := loaded[name].get("lastError"):
            found = f"can't evaluate {name}: {printable(str(error))[:200]}"
            looked.mistakes.append(Finding(where, found, fix="mend what it says; two jobs with the same series?"))


def shipped_rules() -> set[str]:
    """Return the names of the rules and alerts that come with this kvobs."""
    files = {path: text for path, text in dashboards.contents().items() if path.startswith("rules/")}
    return {name for text in files.values() for name in _RULE.findall(text.decode())}


def _look_at_jobs(
    looked: Looked, where: str, facts: dict[str, str], targets: Sequence[Mapping[str, Any]], urls: Sequence[str]
) -> None:
    jobs: dict[str, list[Mapping[str, Any]]] = {}
    for target in targets:
        jobs.setdefault(target.get("labels", {}).get("job", "?"), []).append(target)
    facts["jobs"] = ", ".join(
        f"{job} ({sum(target.get('health') == 'up' for target in of)} of {len(of)} up)"
        for job, of in sorted(jobs.items())
    )
    for name in ("kvobs", "vllm"):
        if name not in jobs:
            found = f"has no job {name!r}, which kvobs's boards and alerts ask for"
            looked.warnings.append(Finding(where, found, fix="add it: see 'Scraping' in docs/metrics.md"))
        for target in jobs.get(name, ()):
            if target.get("health") == "down":  # it may be unknown until the first scrape
                error = printable(str(target.get("lastError") or "down"))[:200]
                found = f"can't scrape {printable(str(target.get('scrapeUrl')))} of job {name!r}: {error}"
                looked.mistakes.append(Finding(where, found, fix="correct the target, or start what it names"))
    scraped = {_port(str(target.get("scrapeUrl"))) for target in targets}
    for url in urls:
        if _port(url) not in scraped:
            found = f"scrapes no target at the port of {url}"
            looked.warnings.append(Finding(where, found, fix="add it to the targets of the job 'kvobs'"))


def _port(url: str) -> int:
    """Return the port of an URL: hosts have other names where Prometheus runs."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _data(prometheus: str, path: str, query: Mapping[str, str]) -> Any:
    """Return the data of an answer of Prometheus's API."""
    text, _ = get(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}", "application/json")
    try:
        answer = json.loads(text)
        if answer["status"] == "success":
            return answer["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise NoAnswerError("is no Prometheus: its API does not answer as one")
