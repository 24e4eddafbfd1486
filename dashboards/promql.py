"""Write PromQL about the signals of kvobs: what is not registered can't be queried.

Boards ask with variables and ``$__rate_interval``, rules with fixed windows: both are a ``Selection``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvobs.schema.percentiles import middle_promql
from kvobs.schema.signals import OPEN, SIGNALS, Kind, Signal, labelnames
from kvobs.vllm_api.hooks import SCHEDULER_HOOKS

CLUSTER = "cluster"
ENGINE_LABELS = (CLUSTER, "job", "instance", "model_name", "engine")
"""Labels of every series in addition to its signal's labels: Prometheus's and vLLM's; not every site has a cluster."""
SITE_LABELS = (CLUSTER, "namespace", "pod")
"""Labels that some sites have, and others have not."""
CONNECTOR = "connector"
SCHEDULER_CALLS = "|".join(SCHEDULER_HOOKS)
"""The hooks within the scheduler's step, as values of the label ``hook``."""
WAITS = "lookup|load|awaiting_schedule"
"""What requests wait for, as values of the label ``kind``."""
ENGINE = f"on ({', '.join(ENGINE_LABELS)})"
"""What joins series of one engine."""


@dataclass(frozen=True)
class Selection:
    """Select the series that are meant, and the window of rates.

    ``engine`` are matchers for any series, ``connector`` further ones for those about a connector; each is empty or
    ends without a comma, as ``job=~"$job"``. ``beside`` is a query: vLLM's metrics are taken from the engines that it
    finds, on the same host, whatever the port. ``among`` is also a query: only series of the engines that it finds are
    meant.
    """

    window: str
    engine: str = ""
    connector: str = ""
    beside: str = ""
    among: str = ""

    def series(self, signal: Signal, part: str = "", **labels: str) -> str:
        """Return a selector; ``part`` is a histogram's ``_bucket``, ``_sum`` or ``_count``.

        A label's value may be several, with "|" between them; ValueError for what the signal has not.
        """
        _check(signal, part, labels)
        given = [f'{name}{"=~" if "|" in value else "="}"{value}"' for name, value in labels.items()]
        connector = self.connector if CONNECTOR in labelnames(signal) else ""
        matchers = ",".join(m for m in (self.engine, connector, *given) if m)
        return f"{signal.name}{part}{{{matchers}}}"

    def rate(self, signal: Signal, *by: str, part: str = "", **labels: str) -> str:
        """Return a counter's rate per second, summed up by these labels."""
        return self._sum("rate", signal, by, part, labels)

    def increase(self, signal: Signal, *by: str, part: str = "", **labels: str) -> str:
        """Return a counter's increase over the window, summed up by these labels."""
        return self._sum("increase", signal, by, part, labels)

    def count(self, signal: Signal, *by: str) -> str:
        """Return how often something rare happened within the window, summed up by these labels.

        A series begins with its first event, which no increase shows: what was not there before counts as a whole.
        """
        _check_counter(signal)
        series = self.series(signal)
        young = f"({series} unless {series} offset {self.window})"
        return f"sum{_by(by)} ({young} or increase({series}[{self.window}]))"

    def quantile(self, q: float, signal: Signal, *by: str, **labels: str) -> str:
        """Return a quantile of a histogram over the window, for each combination of these labels."""
        linear = f"histogram_quantile({q}, {self.rate(signal, 'le', *by, part='_bucket', **labels)})"
        return middle_promql(linear) if signal.is_narrow else linear

    def mean(self, signal: Signal, *by: str, **labels: str) -> str:
        """Return a histogram's mean over the window, absent where nothing was observed."""
        total, count = (self.rate(signal, *by, part=part, **labels) for part in ("_sum", "_count"))
        return ratio(total, count)

    def gauge(self, signal: Signal, *by: str, how: str = "sum", **labels: str) -> str:
        """Return a gauge, put together by these labels: ``how`` is sum or max."""
        return f"{how}{_by(by)} ({self._of_engines(self.series(signal, **labels))})"

    def rates(self, signal: Signal, **labels: str) -> str:
        """Return a counter's rates per second, series by series, to be combined with the rates of others."""
        _check_counter(signal)
        return f"rate({self.series(signal, **labels)}[{self.window}])"

    def vllm_series(self, name: str, *matchers: str) -> str:
        """Return a selector of a metric of vLLM, given without prefix.

        Prometheus 2 stores ``vllm_x`` where vLLM has ``vllm:x`` in OpenMetrics.
        """
        named = f'__name__=~"vllm[:_]{name}"'
        return "{" + ",".join(m for m in (named, self.engine, *matchers) if m) + "}"

    def vllm_quantile(self, q: float, name: str, *by: str) -> str:
        """Return a quantile of a histogram of vLLM."""
        return f"histogram_quantile({q}, sum{_by(('le', *by))} ({self._vllm_rates(f'{name}_bucket')}))"

    def vllm_rate(self, name: str, *by: str, matching: str = "") -> str:
        """Return the rate per second of a counter of vLLM, or of its series with this matcher."""
        return f"sum{_by(by)} ({self._vllm_rates(name, matching)})"

    def vllm_gauge(self, name: str, *by: str, how: str = "sum") -> str:
        """Return a gauge of vLLM, put together by these labels."""
        return f"{how}{_by(by)} ({self.on_host(self.vllm_series(name))})"

    def _vllm_rates(self, name: str, matching: str = "") -> str:
        return self.on_host(f"rate({self.vllm_series(name, matching)}[{self.window}])")

    def on_host(self, series: str) -> str:
        """Return the series of the engines that ``beside`` finds, on their hosts."""
        if not self.beside:
            return series
        return f"{with_host(series)} and on (cluster, host, model_name, engine) {with_host(self.beside)}"

    def _of_engines(self, series: str) -> str:
        return f"{series} and {ENGINE} ({self.among})" if self.among else series

    def _sum(self, function: str, signal: Signal, by: tuple[str, ...], part: str, labels: dict[str, str]) -> str:
        if signal.kind is Kind.GAUGE:
            raise ValueError(f"{signal.name} is a gauge: it has no rate")
        for name in by:
            _check_label(signal, name)
        rates = f"{function}({self.series(signal, part, **labels)}[{self.window}])"
        return f"sum{_by(by)} ({self._of_engines(rates)})"


def ratio(part: str, whole: str) -> str:
    """Return a share that is absent, not NaN, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str) -> str:
    """Return a share that is 0, not absent, where the whole is there and the part has not been counted yet.

    A series appears when it is first used: without this, what never failed would look as if it had no traffic.
    """
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def worst(expr: str) -> str:
    """Return the greatest of some values, with the labels that identify it."""
    return f"topk(1, {expr})"


def with_host(expr: str) -> str:
    """Return series with the label ``host``: their instance without its port."""
    return f'label_replace({expr}, "host", "$1", "instance", "(.+?)(:[0-9]+)?")'


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _check(signal: Signal, part: str, labels: dict[str, str]) -> None:
    if not any(signal is known for known in SIGNALS):
        raise ValueError(f"{signal.name} is not a signal of kvobs")
    parts = ("_bucket", "_sum", "_count") if signal.kind is Kind.HISTOGRAM else ("",)
    if part not in parts:
        raise ValueError(f"{signal.name} is a {signal.kind.value}: its parts are {parts}, not {part!r}")
    for name, value in labels.items():
        _check_label(signal, name)
        allowed = signal.labels.get(name, OPEN)
        if allowed is not OPEN and not set(value.split("|")) <= set(allowed):
            raise ValueError(f"{signal.name}: {name} is one of {', '.join(allowed)}, not {value!r}")


def _check_counter(signal: Signal) -> None:
    if signal.kind is not Kind.COUNTER:
        raise ValueError(f"{signal.name} is a {signal.kind.value}, not a counter")


def _check_label(signal: Signal, name: str) -> None:
    known = {*ENGINE_LABELS, *SITE_LABELS, *labelnames(signal), *({"le"} if signal.kind is Kind.HISTOGRAM else ())}
    if name not in known:
        raise ValueError(f"{signal.name} has no label {name!r}: it has {', '.join(sorted(known))}")
