"""Read from /metrics the part of kvobs's metrics, and of vLLM's own, that `kvobs top` shows."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvobs.cli.output import printable
from kvobs.cli.series import Series, Values
from kvobs.cli.web import NoAnswerError, get
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions

PLAIN = "text/plain"
PREFIX = "kvobs_"
NO_METRICS = (
    f"no {PREFIX}* metrics here: where the exporter runs they are at its own port "
    f"({ExporterOptions.model_fields['port'].default} by default); else check that kvobs is enabled"
)
# Of vLLM's own metrics, which an exporter does not have.
RUNNING, WAITING, TTFT = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"
_OF_VLLM = {RUNNING, WAITING, f"{TTFT}_bucket"}
_CALL_BUCKETS = f"{signals.CALL_DURATION.name}_bucket"
"""Two thirds of kvobs's lines, of which nothing is shown."""


@dataclass(frozen=True)
class Scrape:
    """A server's metrics and their time."""

    at_s: float
    """By the clock ``time.monotonic``."""
    values: Values
    """kvobs's metrics."""
    vllm: Values = field(default_factory=dict)


def fetch(url: str, of_vllm: str | None = None) -> Scrape:
    """Read kvobs's metrics once, and vLLM's own, there or at ``of_vllm``; ``NoAnswerError`` if kvobs's are missing."""
    text = get(url, PLAIN).text
    values, vllm = values_of(text), parse_vllm(text)
    if of_vllm is not None:
        engines = {dict(labels).get("engine") for _, labels in values}
        with suppress(NoAnswerError):
            vllm = {
                (name, labels): value
                for (name, labels), value in parse_vllm(get(of_vllm, PLAIN).text).items()
                if dict(labels).get("engine") in engines
            }
    return Scrape(time.monotonic(), values, vllm)


def values_of(text: str) -> Values:
    """Return kvobs's metrics in a page; ``NoAnswerError`` without any, or with the last ones of an engine."""
    try:
        values = parse(text)
    except ValueError as error:
        raise NoAnswerError(f"its metrics can't be read: {printable(str(error))[:200]}") from None
    if not values:
        raise NoAnswerError(NO_METRICS)
    ends = {signals.ENGINE_UP.name: 0, signals.ENGINE_ENDED.name: 1}
    if any(ends.get(name) == value for (name, _), value in values.items()):
        # Its exporter shows it; vLLM's own server has no such metric.
        raise NoAnswerError(f"its engine has ended{_end(values)}")
    return values


def _end(values: Values) -> str:
    """Return in which connector's call an engine ended, and of what."""
    end = next((dict(labels) for name, labels in values if name == signals.ENGINE_ENDED.name), {})
    where = f" in {end.get('hook')} of connector {end['connector']}" if end.get("connector") else ""
    return f"{where}: {end.get('reason')}" if end else ""


def parse(text: str) -> dict[Series, float]:
    """Return kvobs's metrics in the text of /metrics, without what is no number; ValueError for a malformed line."""
    return _parse(text, lambda name: name.startswith(PREFIX) and name != _CALL_BUCKETS)


def parse_vllm(text: str) -> dict[Series, float]:
    """Return what is read of vLLM's own metrics; empty for text that is malformed."""
    try:
        return _parse(text, _OF_VLLM.__contains__)
    except ValueError:
        return {}


def _parse(text: str, is_read: Callable[[str], bool]) -> dict[Series, float]:
    lines = (line for line in text.splitlines() if is_read(line.partition("{")[0].partition(" ")[0]))
    return {
        (sample.name, frozenset((label, printable(value)) for label, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines))
        for sample in family.samples
        if math.isfinite(sample.value) and not math.isnan(float(sample.labels.get("le", 0)))
    }
