"""Read kvobs's metrics, and some of vLLM's, from the text of /metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families

from kvobs.cli.web import NoAnswerError, get
from kvobs.export.numbers import PREFIX, PROMPT_TOKENS, RUNNING, TTFT, WAITING, Scrape, Series, Values
from kvobs.export.texts import printable
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions

PLAIN = "text/plain"


class EndedError(NoAnswerError):
    """The engine of these metrics has ended; its exporter serves the last ones."""


NO_METRICS = (
    f"no {PREFIX}* metrics here: if the exporter runs, it serves them at its own port "
    f"({ExporterOptions.model_fields['port'].default} by default); otherwise check that kvobs is enabled"
)
_OF_VLLM = {RUNNING, WAITING, f"{TTFT}_bucket", PROMPT_TOKENS}
_CALL_BUCKETS = f"{signals.CALL_DURATION.name}_bucket"
"""Two thirds of kvobs's lines, which are not shown."""


def fetch(url: str, of_vllm: str | None = None, *, ended: bool = False) -> Scrape:
    """Read kvobs's metrics once, and vLLM's own, there or at ``of_vllm``; ``NoAnswerError`` if kvobs's are missing.

    With ``ended``, the last metrics of engines that have ended are also read.
    """
    text = get(url, PLAIN).text
    values, vllm = all_of(text) if ended else values_of(text), parse_vllm(text)
    if of_vllm is not None:
        engines = {dict(labels).get("engine") for _, labels in values}
        with suppress(NoAnswerError):
            vllm = {
                (name, labels): value
                for (name, labels), value in parse_vllm(get(of_vllm, PLAIN).text).items()
                if dict(labels).get("engine") in engines
            }
    return Scrape(time.monotonic(), values, vllm)


def all_of(text: str) -> Values:
    """Return kvobs's metrics in a page; ``NoAnswerError`` without any."""
    try:
        values = parse(text)
    except ValueError as error:
        raise NoAnswerError(f"its metrics can't be read: {printable(str(error))[:200]}") from None
    if not values:
        raise NoAnswerError(NO_METRICS)
    return values


def values_of(text: str) -> Values:
    """Return kvobs's metrics in a page; ``NoAnswerError`` without any, or with the last ones of its engines."""
    values = all_of(text)
    if end := end_of(values):
        raise EndedError(end)
    return values


def end_of(values: Values) -> str:
    """Return that the engine of these metrics has ended, and in what; empty while it runs."""
    up = [value for (name, _), value in values.items() if name == signals.ENGINE_UP.name]
    has_ended = any(name == signals.ENGINE_ENDED.name and value == 1 for (name, _), value in values.items())
    # vLLM's server ends with one of its engines.
    return f"its engine has ended{_end(values)}" if has_ended or (up and not any(up)) else ""


def _end(values: Values) -> str:
    """Return in which connector's call an engine ended, and of what."""
    end = next((dict(labels) for name, labels in values if name == signals.ENGINE_ENDED.name), {})
    where = f" in {end.get('hook')} of connector {end['connector']}" if end.get("connector") else ""
    return f"{where}: {end.get('reason')}" if end else ""


def parse(text: str) -> dict[Series, float]:
    """Return the finite values of kvobs's metrics in the text of /metrics; ValueError for a malformed line."""
    return _parse(text, lambda name: name.startswith(PREFIX) and name != _CALL_BUCKETS)


def parse_vllm(text: str) -> dict[Series, float]:
    """Return what is read of vLLM's own metrics; empty for text that is malformed."""
    try:
        return _parse(text, _OF_VLLM.__contains__)
    except ValueError:
        return {}


def _parse(text: str, is_read: Callable[[str], bool]) -> dict[Series, float]:
    lines = (line for line in text.split("\n") if is_read(line.partition("{")[0].partition(" ")[0]))
    return {
        (sample.name, frozenset((label, printable(value)) for label, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines))
        for sample in family.samples
        if math.isfinite(sample.value) and not math.isnan(float(sample.labels.get("le", 0)))
    }
