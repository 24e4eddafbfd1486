"""Continue the series that an incident left in Prometheus, and see which shipped alerts fire on them, and when."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dashboards.alerts import rule_groups
from dashboards.rules import INTERVAL
from dashboards.site import Site
from tests.engine.prometheus import Prometheus
from tests.support.promtool import promtool

SERIES = '{job=~"kvobs|vllm",__name__=~"up|kvobs_.+|vllm:num_requests.+"}'
SCRAPE_S = 15
GOES_ON_S = 900
WATCHED_S = 120
"""Before an incident: a new Prometheus knows little."""
FEW = 2
"""So few samples may rise by chance, of what rises and falls."""
MOST = 2 / 3
"""Has risen for so much of the time without a fall: it fell by chance before."""
MISSED_S = 10
"""After so many scrapes of a second each a series has ended."""
_TIMES = ("_timestamp_seconds", "start_time_seconds")
"""Ends of the names of gauges that are points of time: promtool's clock begins at 0."""
_GROWING = ("_total", "_count", "_sum", "_bucket", "_seconds")

_AT = re.compile(r", time: (\S+),\n\s+exp: nil\n\s+got: (.*)")
_ALERT = re.compile(r'\{__name__="ALERTS", (.*?)\} 1E\+00')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNITS = {"h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class Recorded:
    """Series as they were until now, each as (labels, (time, value) pairs), and when the incident began."""

    series: Sequence[tuple[Mapping[str, str], Sequence[tuple[float, float]]]]
    began: float
    until: float
    pace: int = 1
    """So many times as slowly all goes on in the scene, from its beginning."""

    @classmethod
    def of(cls, prometheus: Prometheus, began: float, pace: int = 1) -> Recorded:
        """Return those of both jobs, beginning three scrapes before the incident."""
        until = time.time()
        found = prometheus.api("query", query=f"{SERIES}[{round(until - began) + 3}s]", time=until)["result"]
        return cls([(s["metric"], [(t, float(v)) for t, v in s["values"]]) for s in found], began, until, pace)

    def after(self, earlier: Recorded, gap_s: float) -> Recorded:
        """Return both, the earlier one so long before this one."""
        shift = earlier.until + gap_s - self._start
        series = {_selector(labels): (labels, samples) for labels, samples in self.series}
        for labels, samples in earlier.series:
            is_time = labels["__name__"].endswith(_TIMES)
            before = [(t - shift, v - shift * is_time) for t, v in samples]
            key = _selector(labels)
            series[key] = labels, [*before, *(series[key][1] if key in series else ())]
        return Recorded(list(series.values()), self.began, self.until)

    @property
    def _start(self) -> float:
        """Return a time two minutes before the exporter was first scraped: it is as it was then, for as long."""
        ups = (samples for labels, samples in self.series if (labels["__name__"], labels["job"]) == ("up", "kvobs"))
        return next(ups)[0][0] - WATCHED_S

    def scene(self) -> tuple[list[dict[str, str]], float]:
        """Return promtool's input, a sample each ``SCRAPE_S``, and when the incident begins in it.

        All goes on as it did; but the exporter of an engine that has ended ends, too.
        """
        start, moments = self._start, int((self._later(self.until) + GOES_ON_S - self._start) / SCRAPE_S)
        # 2: the previous life has, which the next one says.
        has_ended = any(labels["__name__"] == "kvobs_engine_ended" and now[-1][1] == 1 for labels, now in self.series)
        scene = []
        for labels, samples in self.series:
            ends = self.until + SCRAPE_S if has_ended and labels["job"] == "kvobs" else math.inf
            times = [start + i * SCRAPE_S for i in range(moments)]
            times = [t if t < self.began else self.began + (t - self.began) / self.pace for t in times]
            values = (self._value(labels["__name__"], samples, t) if t < ends else "stale" for t in times)
            scene.append({"series": _selector(labels), "values": " ".join(values)})
        return scene, self.began - start

    def _later(self, at: float) -> float:
        """Return when in the scene is what was at this time."""
        return max(at, self.began + (at - self.began) * self.pace)

    def _value(self, name: str, samples: Sequence[tuple[float, float]], at: float) -> str:
        i = bisect.bisect_right(samples, (at, math.inf)) - 1
        if i < 0 and samples[0][0] > self._start + WATCHED_S + 1.5:  # the two jobs are a second apart at most
            return "_"
        i = max(i, 0)
        if min(at, self.until) - samples[i][0] > MISSED_S:
            return "stale"
        value, growth = samples[i][1], 0.0
        lately = [sample for sample in samples if sample[0] >= self.began]
        if at > self.until and len(lately) > FEW:
            falls = (i for i, (a, b) in enumerate(itertools.pairwise(lately), 1) if a[1] > b[1])
            risen = lately[max(falls, default=0) :]
            (first_at, first), (last_at, last) = risen[0], risen[-1]
            if len(risen) < MOST * len(lately):  # it rises and falls: so it goes on
                value = lately[int((at - self.until) / SCRAPE_S) % len(lately)][1]
            elif name.endswith(_GROWING):
                growth = (last - first) / (last_at - first_at) * (at - last_at)
        value += growth
        if name.endswith(_TIMES):
            value = self._later(value) - self._start
        return f"{value:.6f}".replace("nan", "NaN")


def _selector(labels: Mapping[str, str]) -> str:
    inner = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items() if name != "__name__")
    return f"{labels['__name__']}{{{inner}}}"


@dataclass(frozen=True)
class Fired:
    """An alert, and when it fired first, in seconds since the incident began."""

    name: str
    labels: Mapping[str, str]
    after_s: float


def alerts_of(recorded: Recorded, folder: Path) -> list[Fired]:
    """Return the alerts that fire on what was recorded, the first first."""
    rules, (series, began) = rule_groups(Site()), recorded.scene()
    times = range(0, len(series[0]["values"].split()) * SCRAPE_S, int(INTERVAL.removesuffix("s")))
    asked = 'ALERTS{alertname=~"Kvobs.+",alertstate="firing",severity!="info"}'
    content = {
        "rule_files": ["rules.json"],
        "evaluation_interval": INTERVAL,
        "group_eval_order": [group["name"] for group in rules["groups"]],
        "tests": [
            {
                "interval": f"{SCRAPE_S}s",
                "input_series": series,
                # Nothing is expected, so that promtool prints what there is.
                "promql_expr_test": [{"expr": asked, "eval_time": f"{at}s", "exp_samples": []} for at in times],
            }
        ],
    }
    (folder / "rules.json").write_text(json.dumps(rules))
    (folder / "incident.json").write_text(json.dumps(content))
    said = promtool("test", "rules", folder / "incident.json").stderr
    fired: dict[tuple[str, ...], Fired] = {}
    for clock, got in _AT.findall(said):
        at = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([hms])", clock))
        for found in _ALERT.findall(got) if at >= began else ():
            labels = dict(_LABEL.findall(found))
            key = labels["alertname"], labels.get("connector", ""), labels.get("rank", "")
            fired.setdefault(key, Fired(labels["alertname"], labels, round(at - began)))
    return list(fired.values())
