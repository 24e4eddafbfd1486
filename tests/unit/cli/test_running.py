"""The live doctor on real exporters' answers and a real Prometheus: what is fine, and what each fault is called."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.cli import dashboards, running
from kvobs.cli.running import OPENMETRICS, look, shipped_rules
from kvobs.cli.scrapes import NO_METRICS
from kvobs.cli.web import Page
from kvobs.probe.recorder import Recorder
from kvobs.schema import __version__
from kvobs.schema.signals import (
    CALL_DURATION,
    CORRUPT_BLOCKS,
    ENGINE_ENDED,
    ENGINE_UP,
    INTERNAL_ERRORS,
    LOAD_DURATION,
    LOADS,
    LOOKUPS,
    OLDEST_IN_FLIGHT,
    QUARANTINED,
    SPANS_QUEUED,
    slot,
)
from tests.engine.prometheus import major, scraping
from tests.support.top_engines import Engines, answering, count, exporting, serving, thrashing, unserved
from tests.support.waiting import eventually


@pytest.fixture
def exporter() -> Iterator[str]:
    """Return the metrics' URL of an exporter with two connectors."""
    with exporting(lambda recorder: count(recorder, 0, LOADS, 3, "async", "ok"), {}, [], ("cpu", "disk")) as address:
        yield f"http://{address}/metrics"


def jobs(*targets: tuple[str, str], rules: Path | None = None) -> str:
    lines = [] if rules is None else [f"rule_files: ['{rules}/rules/*.yml']"]
    lines += ["scrape_configs:"]
    lines += [f"  - {{job_name: {job}, static_configs: [{{targets: ['{address}']}}]}}" for job, address in targets]
    return "\n".join(lines) + "\n"


def address_of(url: str) -> str:
    return url.removeprefix("http://").removesuffix("/metrics")


def test_facts_of_a_server_are_printed(exporter: str) -> None:
    looked = look([exporter])
    assert looked.mistakes == []
    facts = looked.facts[exporter]
    assert (facts["vLLM"], facts["connectors"], facts["exemplars"]) == ("0.32.0", "cpu (Idle), disk (Idle)", "0")
    assert int(facts["series of kvobs"]) >= 5
    assert looked.warnings == [], "nothing is traced"


def test_exemplars_are_missed_where_spans_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "get", lambda *_: Page(f"{SERIES}{SPANS_QUEUED.name} 0\n", OPENMETRICS))
    (warning,) = look(["http://x/metrics"]).warnings
    assert warning.found == "exports spans, but has no exemplars"


@pytest.mark.parametrize("reason", ["SIGKILL", ""])
def test_the_end_of_an_engine_has_its_own_fix(reason: str) -> None:
    ended = f'{ENGINE_ENDED.name}{{reason="{reason}"}} 1\n' if reason else f"{ENGINE_UP.name} 0\n"
    with answering(200, SERIES + ended) as url:
        (problem,) = look([url]).mistakes
    assert problem.found == "its engine has ended" + (f": {reason}" if reason else "")
    assert "out-of-memory killer" in problem.fix
    assert "kvobs timeline" in problem.fix


def test_exporter_of_another_host_counts_nothing_twice(exporter: str) -> None:
    with exporting(lambda _: None, {}, [], ("cpu",), has_core=False) as address:
        looked = look([exporter, other := f"http://{address}/metrics"])
    assert looked.facts[other]["EngineCore"] == "on another host, whose exporter has its numbers"
    assert looked.warnings == []


def test_exemplars_are_counted_at_the_path_with_the_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM's API server has OpenMetrics; each form of the metrics is read once."""
    asked: list[str] = []
    text = 'kvobs_load_duration_seconds_bucket{le="1.0"} 1'

    def get(url: str, _accept: str) -> Page:
        asked.append(url)
        if not url.endswith("/"):
            return Page(f"{text}\n", "text/plain")
        return Page(f'{text} # {{trace_id="ab"}} 0.5 1.0\n# EOF\n', "application/openmetrics-text; version=1.0.0")

    monkeypatch.setattr(running, "get", get)
    assert look(["http://x/metrics"]).facts["http://x/metrics"]["exemplars"] == "1"
    assert asked == ["http://x/metrics", "http://x/metrics", "http://x/metrics/"]


def test_a_server_without_openmetrics_is_named() -> None:
    with serving(Engines("cpu")) as address:
        (warning,) = look([f"http://{address}/metrics"]).warnings
    assert "serves no OpenMetrics here" in warning.found


SERIES = 'kvobs_loads_total{connector="cpu",mode="async",outcome="ok"} 1\n'


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, SERIES * 2, 'serves 1 series more than once, such as kvobs_loads_total{connector="cpu"'),
        (200, "vllm:x 1\n", NO_METRICS),
        (404, "", "answered 404 Not Found"),
    ],
)
def test_a_server_with_no_or_doubled_metrics_is_an_error(status: int, body: str, says: str) -> None:
    with answering(status, body) as url:
        (mistake,) = look([url]).mistakes
    assert mistake.found.startswith(says)


def failing(recorder: Recorder) -> None:
    for outcome, n in (("ok", 3), ("failed", 1)):
        recorder.count(0, slot(LOADS, "async", outcome), n)


def corrupt(recorder: Recorder) -> None:
    for rank in "01":
        recorder.count_dynamic(0, CORRUPT_BLOCKS, rank)


def slow(recorder: Recorder) -> None:
    recorder.observe(0, LOAD_DURATION, 3 * 10**9, "async")


@pytest.mark.parametrize(
    ("record", "gauges", "mistakes", "warnings"),
    [
        (
            lambda _: None,
            {(0, QUARANTINED): 1},
            ["connector cpu is in quarantine: new requests are served without it"],
            [],
        ),
        (corrupt, {}, ["connector cpu loaded 2 blocks with wrong bytes since the engine's start"], []),
        (failing, {}, ["connector cpu fails: 25% of its loads, exceptions included, since the engine's start"], []),
        (
            slow,
            {},
            [],
            ["connector cpu is slow: since the engine's start the p99 of its loads is 3.08 s, their mean 3 s"],
        ),
    ],
)
def test_a_connector_that_is_not_well_is_named(
    record: Any, gauges: Any, mistakes: list[str], warnings: list[str]
) -> None:
    with exporting(record, gauges, [], ("cpu", "disk")) as address:
        looked = look([f"http://{address}/metrics"])
    assert [mistake.found for mistake in looked.mistakes] == mistakes
    assert [warning.found for warning in looked.warnings if warning.found.startswith("connector ")] == warnings


def test_lost_measurements_are_warnings() -> None:
    with answering(200, f'{INTERNAL_ERRORS.name}{{where="merge"}} 2\n') as url:
        noted = [warning.found for warning in look([url]).warnings]
    assert any(says.startswith("kvobs_internal_errors_total is 2: measurements") for says in noted)


def test_a_connector_that_never_serves_is_a_warning() -> None:
    with answering(200, unserved()) as url:
        warning = next(warning for warning in look([url]).warnings if "cpu" in warning.found)
    assert warning.found.startswith("connector cpu never serves: nothing was loaded from it since the engine's start")
    assert warning.fix == "see KvobsNeverServes in the runbook"


def test_a_connector_that_thrashes_is_a_warning() -> None:
    with answering(200, thrashing()) as url:
        looked = look([url])
    assert not looked.mistakes
    (warning,) = [warning for warning in looked.warnings if "cpu" in warning.found]
    assert warning.found == (
        "connector cpu thrashes: since the engine's start prompts asked again for 40% of what it evicted, and it "
        "loaded less than that"
    )
    assert warning.fix == "see KvobsStoreTooSmall in the runbook"


def test_a_connector_that_hangs_is_a_mistake() -> None:
    begun = {(0, OLDEST_IN_FLIGHT, "load"): time.perf_counter_ns() - 20 * 10**9}
    with exporting(lambda _: None, begun, [], ("cpu", "disk")) as address:
        looked = look([f"http://{address}/metrics"])
    assert [re.sub(r"2\d s", "20 s", mistake.found) for mistake in looked.mistakes] == [
        "connector cpu hangs: load for 20 s"
    ]
    assert looked.facts[f"http://{address}/metrics"]["connectors"] == "cpu (Hangs), disk (Idle)"


def test_engine_at_two_addresses_is_doubled(exporter: str) -> None:
    noted = [warning.path for warning in look([exporter, exporter.replace("127.0.0.1", "localhost")]).warnings]
    assert "--server" in noted


def test_a_prometheus_that_has_it_all_is_fine(exporter: str, tmp_path: Path) -> None:
    dashboards.export(tmp_path / "out", dashboards.contents())
    configuration = jobs(("kvobs", address_of(exporter)), ("vllm", address_of(exporter)), rules=tmp_path / "out")
    with scraping(tmp_path, drop_of_vllm(configuration), "--enable-feature=exemplar-storage") as prometheus:
        assert eventually(lambda: prometheus.value("sum(up)") == 2)
        where = f"http://127.0.0.1:{prometheus.port}"
        looked = look([exporter], where)
    assert looked.mistakes == []
    assert looked.warnings == []
    facts = looked.facts[where]
    assert facts["rules of kvobs"] == f"{len(shipped_rules())} of {len(shipped_rules())}"
    assert facts["jobs"] == "kvobs (1 of 1 up), vllm (1 of 1 up)"
    assert facts["alerts that fire"] == "none"


def test_an_alert_has_its_connector_and_its_beginning(exporter: str, tmp_path: Path) -> None:
    begun = time.time()
    (tmp_path / "rules").mkdir()
    labels = "labels: {severity: critical, connector: cpu}"
    alerts = [f"{{alert: KvobsJobMissing, expr: kvobs_engine_up == 1, {labels}}}",
              "{alert: KvobsCallHangs, expr: kvobs_engine_up == 1, for: 1h}"]  # fmt: skip
    (tmp_path / "rules/some.yml").write_text(f"groups: [{{name: g, interval: 1s, rules: [{', '.join(alerts)}]}}]\n")
    with scraping(tmp_path, jobs(("kvobs", address_of(exporter)), rules=tmp_path)) as prometheus:
        assert eventually(lambda: prometheus.value('count(ALERTS{alertstate="firing"})') == 1)
        where, address = f"127.0.0.1:{prometheus.port}", address_of(exporter)
        (alert,) = look([], f"http://{where}").alerts
        arguments = ["check", "--prometheus", where]
        shown = CliRunner().invoke(cli.app, arguments).stdout.splitlines()
        noted = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout)
        since = prometheus.value('ALERTS_FOR_STATE{alertname="KvobsJobMissing"}')
    assert (alert.name, alert.severity, alert.connector, alert.instance) == (
        "KvobsJobMissing", "critical", "cpu", address
    )  # fmt: skip
    assert since is not None
    assert begun - 1 < since <= alert.since < since + 1
    (line,) = [line for line in shown if line.startswith("alert: ")]
    assert line.startswith(f"alert: KvobsJobMissing (critical) of connector cpu at {address}, since 20")
    assert noted["alerts"] == [asdict(alert)]
    assert noted["facts"][f"http://{where}"]["alerts that fire"] == "KvobsJobMissing"
    assert shown[-1].endswith(", 1 alert")


def drop_of_vllm(configuration: str) -> str:
    """Let the job vllm drop what is kvobs's, as docs/metrics.md says."""
    drop = "metric_relabel_configs: [{source_labels: [__name__], regex: 'kvobs_.*', action: drop}], "
    return configuration.replace("{job_name: vllm, ", f"{{job_name: vllm, {drop}")


def test_every_fault_of_a_prometheus_is_named(exporter: str, tmp_path: Path) -> None:
    """No rules, no exemplars, a target that is gone, and kvobs's series in two jobs."""
    targets = [("kvobs", address_of(exporter)), ("other", address_of(exporter)), ("vllm", "127.0.0.1:9")]
    with scraping(tmp_path, jobs(*targets)) as prometheus:
        assert eventually(lambda: prometheus.value("count(kvobs_build_info)") == 2)
        assert eventually(lambda: prometheus.value('up{job="vllm"}') == 0)
        looked = look([exporter, "http://127.0.0.1:1/metrics"], f"http://127.0.0.1:{prometheus.port}")
    mistakes = " | ".join(f"{one.path} {one.found}" for one in looked.mistakes)
    assert "http://127.0.0.1:1/metrics no answer" in mistakes
    assert "can't scrape http://127.0.0.1:9/metrics of job 'vllm'" in mistakes
    assert f"has kvobs's metrics of engine 0 of {address_of(exporter)} 2 times" in mistakes
    warnings = " | ".join(warning.found for warning in looked.warnings)
    assert f"has not loaded {len(shipped_rules())} of kvobs's {len(shipped_rules())} rules" in warnings
    assert "stores no exemplars" in warnings
    assert "scrapes no target at the port of http://127.0.0.1:1/metrics" in warnings


WITHOUT_BUCKETS = {
    "dropped": "metric_relabel_configs: [{source_labels: [__name__], regex: '.*_bucket', action: drop}], "
}
if major() >= 3:
    WITHOUT_BUCKETS["converted"] = "convert_classic_histograms_to_nhcb: true, "


def test_a_job_without_buckets_is_a_mistake(tmp_path: Path) -> None:
    def record(recorder: Recorder) -> None:
        count(recorder, 0, LOOKUPS, 1, "hit")
        recorder.observe(0, CALL_DURATION, 10**6, "start_load_kv")

    with exporting(record, {}, [], ("cpu", "disk")) as address:
        configuration = jobs(*((job, address) for job in ("kvobs", *WITHOUT_BUCKETS)))
        for job, more in WITHOUT_BUCKETS.items():
            configuration = configuration.replace(f"{{job_name: {job}, ", f"{{job_name: {job}, {more}")
        with scraping(tmp_path, configuration) as prometheus:
            assert eventually(lambda: prometheus.value("count(kvobs_lookups_total)") == 1 + len(WITHOUT_BUCKETS))
            looked = look([f"http://{address}/metrics"], f"http://127.0.0.1:{prometheus.port}")
    found = "has no buckets of kvobs's histograms of job {!r}: durations are missing"
    named = [
        job for job in ("kvobs", *WITHOUT_BUCKETS) if any(found.format(job) in each.found for each in looked.mistakes)
    ]
    assert named == [*WITHOUT_BUCKETS]


OTHER_DATA = '{"activeTargets": [], "groups": [{"rules": [{}]}], "result": [{}]}'


@pytest.mark.parametrize(
    "body", ["<html>", *(f'{{"status": "success", "data": {data}}}' for data in ("null", "[]", OTHER_DATA))]
)
def test_another_server_than_a_prometheus_is_named(body: str, exporter: str) -> None:
    with answering(200, body) as url:
        (mistake,) = look([exporter], url.removesuffix("/metrics")).mistakes
    assert mistake.found == "is not a Prometheus server: its API gave an unexpected answer"


def test_the_command_prints_it_and_its_verdict(exporter: str) -> None:
    arguments = ["check", "--server", address_of(exporter)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0
    headline = f"{exporter}: kvobs {__version__} in vLLM 0.32.0; connectors: cpu (Idle), disk (Idle)"
    assert result.stdout.splitlines() == [headline, "no problems"]
    verbose = CliRunner().invoke(cli.app, [*arguments, "-v"]).stdout
    assert verbose.startswith(result.stdout)
    assert "series of kvobs" in verbose
    noted = json.loads(CliRunner().invoke(cli.app, ["check", "--server", address_of(exporter), "--json"]).stdout)
    assert noted["facts"][exporter]["connectors"] == "cpu (Idle), disk (Idle)"
    assert noted.keys() == {"facts", "alerts", "errors", "warnings", "unknown"}
    gone = CliRunner().invoke(cli.app, ["check", "--server", "localhost:1"])
    assert (gone.exit_code, gone.stdout.splitlines()[-1]) == (1, "1 problem")
    assert gone.stdout.startswith("problem: http://localhost:1/metrics: no answer")


@pytest.mark.parametrize("arguments", [[], ["{}", "--server", "localhost"], ["--server", "8000"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, ["check", *arguments]).exit_code == 2
