"""What the boards' questions answer, by promtool's own evaluation of made-up series."""

from pathlib import Path

import pytest

from dashboards import looks, promql, questions
from dashboards.questions import SELECTION, by_connector, by_engine
from kvobs.schema import signals, verdicts
from tests.support.promtool import HOST, answers

pytestmark = pytest.mark.tools

STEADY, RISING = "0+0x20", "0+60x20"  # one sample a minute: a rate of 0, and of 1


def connector(name: str, **counters: str) -> dict[str, str]:
    """Return a connector's series: that it is configured, and counters that rise by 60 a minute or stand still."""
    made = {f'kvobs_connector_info{{connector="{name}",index="0"}}': "1x20", "kvobs_local_cache_tokens{}": "9000x20"}
    for key, values in counters.items():
        metric, _, value = key.partition("__")
        label = f',outcome="{value}"' if value else ""
        made[f'kvobs_{metric}{{connector="{name}"{label}}}'] = values
    return made


CALLED = {"call_duration_seconds_sum": "0+0.01x20"}
OLDEST = 'kvobs_oldest_in_flight_seconds{{connector="{}",kind="{}"}}'.format
COUNT = 'kvobs_call_duration_seconds_count{connector="blocking",hook="get_num_new_matched_tokens"}'
STEPS = f"kvobs_step_seconds_total{{{HOST[1:]}}}"


def calls(name: str, hook: str, seconds: str) -> dict[str, str]:
    """Return the time of calls of a hook."""
    return {f'kvobs_call_duration_seconds_sum{{connector="{name}",hook="{hook}"}}': seconds}


def slow(name: str) -> dict[str, str]:
    """Return loads that all take between 2 and 4 seconds."""
    return {
        f'kvobs_load_duration_seconds_bucket{{connector="{name}",le="{le}"}}': values
        for le, values in (("2", STEADY), ("4", RISING), ("+Inf", RISING))
    }


def fast(name: str) -> dict[str, str]:
    """Return loads that all take less than 2 seconds."""
    return {series.replace('le="4"', 'le="1"'): RISING for series in slow(name)}


def test_the_verdict_is_the_worst_that_is_true(tmp_path: Path) -> None:
    series = (
        connector("idle")
        | connector("well", **CALLED, loads_total__ok=RISING)
        | connector("slow", **CALLED, loads_total__ok=RISING)
        | slow("slow")
        | connector("blocking", **CALLED, loads_total__ok=RISING)
        | slow("blocking")
        | calls("blocking", "get_num_new_matched_tokens", "0+6x20")  # a tenth
        | calls("well", "build_connector_meta", "0+5x20")
        | calls("well", "start_load_kv", RISING)
        | connector("failing", **CALLED, loads_total__ok=RISING, loads_total__failed="0+6x20")
        | calls("failing", "get_num_new_matched_tokens", RISING)
        | slow("failing")
        | connector("out", **CALLED, call_errors_total=RISING, quarantined="1x20")
        | connector("back", **CALLED, loads_total__ok=RISING, quarantined="0x20")
    )
    series |= {
        'kvobs_call_in_progress_seconds{connector="hanging",hook="h",rank="0"}': "10x20",
        'kvobs_engine_ended{connector="fatal",hook="h",reason="SIGKILL"}': "1x20",
        'kvobs_engine_ended{connector="",hook="",reason="SIGKILL"}': "1x20",
        COUNT: "0+300x20",  # of a fiftieth of a second
        **{OLDEST(f"with {kind}", kind): "15x20" for kind in ("lookup", "load", "awaiting_schedule", "save")},
        **{f'kvobs_in_flight{{connector="with {kind}",kind="{kind}"}}': "1x20" for kind in ("load", "save")},
    }
    hanging = ("hanging", "with lookup", "with load", "with awaiting_schedule")
    states = {
        "idle": "Idle", "well": "OK", "slow": "Slow", "blocking": "Blocks steps", "failing": "Failing",
        "out": "Quarantined", "back": "OK", "fatal": "Ended the engine", "with save": "OK",
        **dict.fromkeys(hanging, "Hangs"),
    }  # fmt: skip
    asked = questions.verdict(*by_connector)
    names = {number: name for number, (name, _) in looks.VERDICTS.items()}
    assert {of: names[int(number)] for of, number in answers(tmp_path, series, asked).items()} == states
    # A scheduler that computes nothing polls: it blocks no step.
    asking = series | {COUNT: "0+700x20"}
    assert names[int(answers(tmp_path, asking, asked)["blocking"])] == "Slow"
    # Where a step computes, a loaded request may wait for others.
    computing = asking | {STEPS: RISING, OLDEST("with awaiting_schedule", "load"): "0x20"}
    again = {of: names[int(number)] for of, number in answers(tmp_path, computing, asked).items()}
    assert set(states) - set(again) == {"with awaiting_schedule"}
    assert {of: again[of] for of in again} == {of: states[of] for of in again}


@pytest.mark.parametrize("at", ["10m", "10m20s", "10m40s"])
def test_an_engine_scraped_once_a_minute_computes_in_between(at: str, tmp_path: Path) -> None:
    waits = {OLDEST("cpu", "awaiting_schedule"): "20x20"}
    assert answers(tmp_path, waits | {STEPS: RISING}, questions.resume_ages(*by_connector), at) == {}
    assert answers(tmp_path, waits | {STEPS: "9x20"}, questions.resume_ages(*by_connector), at) == {"cpu": 20}


def test_a_connector_of_an_engine_with_requests_is_not_idle(tmp_path: Path) -> None:
    series = connector("cpu") | {
        f'vllm:num_requests_{name}{{job="vllm",instance="i:8000",model_name="m",engine="0"}}': values
        for name, values in {"running": "0x20", "waiting": "0x8 1x12"}.items()
    }
    verdict = questions.verdict(*by_engine)
    assert [answers(tmp_path, series, verdict, at) for at in ("5m", "10m")] == [{"cpu": 0}, {"cpu": 1}]


def test_a_connector_never_serves_while_the_alert_says_so(tmp_path: Path) -> None:
    alert = 'ALERTS{alertname="%s",alertstate="firing",severity="info",connector="cpu",instance="i:8000",engine="0"%s}'
    job = ',job="j",model_name="m"'
    for name, state in (("KvobsNeverServes", 2), ("KvobsLoadsDontPay", 1)):
        series = connector("cpu", **CALLED) | {alert % (name, job): "1x20"}
        assert answers(tmp_path, series, questions.verdict(*by_connector)) == {"cpu": state}


def evicting(name: str, *media: str, evicted: int, reused: int, loaded: int) -> dict[str, str]:
    """Return a store: how many tokens it evicts and loads a minute, and how many of 100 are asked for again."""
    counters = {"evicted": evicted, "evicted_followed": 100, "evicted_reused": reused}
    of_memory = {f'kvobs_{key}_tokens_total{{connector="{name}",medium="cpu"}}': n for key, n in counters.items()}
    saves = {f'kvobs_save_tokens_total{{connector="{name}",medium="{medium}"}}': 6000 for medium in media}
    loads = {f'kvobs_load_tokens_total{{connector="{name}"}}': loaded} if loaded else {}
    return {series: f"0+{n}x60" for series, n in (of_memory | saves | loads).items()}


def test_a_store_thrashes_if_it_loads_less_than_it_loses(tmp_path: Path) -> None:
    series = (
        evicting("thrashes", "cpu", evicted=6000, reused=40, loaded=2000)
        | evicting("serves none", "cpu", evicted=6000, reused=40, loaded=0)
        | evicting("serves more", "cpu", evicted=6000, reused=40, loaded=3000)
        | evicting("needs it no more", "cpu", evicted=6000, reused=20, loaded=0)
        | evicting("evicts little", "cpu", evicted=3000, reused=40, loaded=0)
        | evicting("has a disk", "cpu", "storage", evicted=6000, reused=40, loaded=0)
    )
    shares = answers(tmp_path, series, questions.thrash_share(*by_connector), "40m")
    assert shares == pytest.approx({"thrashes": 0.4, "serves none": 0.4, "needs it no more": 0.2})
    infos = {f'kvobs_connector_info{{connector="{name}",index="0"}}': "1x60" for name in shares}
    names = {number: name for number, (name, _) in looks.VERDICTS.items()}
    states = answers(tmp_path, series | infos, questions.verdict(*by_connector), "40m")
    assert {of: names[int(states[of])] for of in shares} == {
        "thrashes": "Thrashes", "serves none": "Thrashes", "needs it no more": "Idle",
    }  # fmt: skip


def test_the_tile_shows_hanging_calls_and_all_that_waits(tmp_path: Path) -> None:
    series = {
        'kvobs_call_in_progress_seconds{connector="a",hook="h",rank="0"}': "2x20",
        **{
            OLDEST(f"{kind} {age}", kind): f"{age}x20"
            for kind in ("load", "save", "awaiting_schedule")
            for age in (14, 15)
        },
    }
    assert answers(tmp_path, series, questions.hang_ages()) == {"a": 2, "load 15": 15, "awaiting_schedule 15": 15}


def test_every_measure_of_the_states_is_asked_for() -> None:
    assert set(questions.measures(*by_engine)) == {measure for state in verdicts.STATES for measure in state.limits}


def on(number: int, series: dict[str, str]) -> dict[str, str]:
    """Return series of an engine with this number."""
    of = f',job="j",instance="gpu-{number}:8000",model_name="m",engine="0"}}'
    return {name.replace("}", of).replace("{,", "{"): values for name, values in series.items()}


FAILING_MOST = questions.none_if_empty(f"topk(1, ({questions.failing_share(*by_connector)}) > 0)")


def fleet(engines: int, failing: int) -> dict[str, str]:
    """Return one connector on many engines, of which some fail all loads, and the others none."""
    made: dict[str, str] = {}
    for number in range(engines):
        failed = RISING if number < failing else STEADY
        made |= on(number, connector("disk", loads_total__failed=failed, loads_total__ok=RISING, **CALLED))
    return made


def test_verdict_is_the_one_failing_engine_of_64(tmp_path: Path) -> None:
    series = fleet(64, 1)
    assert answers(tmp_path, series, questions.worst_engine(questions.verdict(*by_engine))) == {"disk": 6}, "Failing"
    assert answers(tmp_path, series, questions.verdict(*by_connector)) == {"disk": 1}, "OK: the mean hides it"
    worst = promql.worst(f"({questions.failing_share(*by_engine)}) > 0")
    assert answers(tmp_path, series, worst, label="instance") == {"gpu-0:8000": 0.5}


def test_an_exception_on_another_host_makes_no_engine_fail(tmp_path: Path) -> None:
    of_ranks = {'kvobs_connector_info{connector="disk"}': "1x20", 'kvobs_call_errors_total{connector="disk"}': RISING}
    series = fleet(1, 0) | on(9, of_ranks)
    assert answers(tmp_path, series, questions.failing_share(*by_engine), label="instance") == {"gpu-0:8000": 0}
    assert answers(tmp_path, series, questions.failures(*by_connector)) == {"disk": 1}, "it is shown"


def test_slowest_engine_of_256_is_named(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for number in range(256):
        series |= on(number, slow("disk") if number == 7 else fast("disk"))
    asked = SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_engine)
    assert answers(tmp_path, series, promql.worst(f"({asked}) >= 0"), label="instance") == {
        "gpu-7:8000": pytest.approx(3.668, rel=1e-3)
    }


def test_firing_alerts_are_the_chosen_ones_or_have_no_such_label(tmp_path: Path) -> None:
    def alert(name: str, severity: str, **labels: str) -> dict[str, str]:
        said = "".join(f',{label}="{value}"' for label, value in labels.items())
        return {f'ALERTS{{alertname="{name}",alertstate="firing",severity="{severity}",job="j"{said}}}': "1x20"}

    series = alert("KvobsJobMissing", "warning") | alert("KvobsTelemetryCost", "info", instance="i", engine="0")
    for rank in "01":
        series |= alert("KvobsLoadUnfinished", "critical", instance="i", engine="0", connector="disk", rank=rank)
    series |= alert("NodeDown", "critical", instance="i")
    series |= {name.replace("firing", "pending").replace("Kvobs", "KvobsNot"): v for name, v in series.items()}
    assert answers(tmp_path, series, questions.alerts_by_severity(), label="alertname") == {
        "KvobsJobMissing": 2, "KvobsTelemetryCost": 1, "KvobsLoadUnfinished": 3,
    }  # fmt: skip
    assert answers(tmp_path, series, questions.alerts_firing(), label="severity") == {
        "critical": 1, "warning": 1, "info": 1,
    }  # fmt: skip
    assert answers(tmp_path, {}, questions.alerts_firing(), label="severity") == {"none": 0}


def test_engines_are_down_that_ended_or_are_not_scraped(tmp_path: Path) -> None:
    def down(up: str, *engines_up: str, known: str = "9000x20") -> dict[str, float]:
        """With a second host of each engine, and a target of another job."""
        engine, others = HOST.removeprefix(","), {'up{job="node",instance="i"}': "0x20"}
        for host, has_core in (("i", True), ("j", False)):
            others[f'up{{job="j",instance="{host}"}}'] = up
            for number, engine_up in enumerate(engines_up or ("1x20",)):
                of = engine.replace('engine="0"', f'engine="{number}"').replace('"i"', f'"{host}"')
                others[f"kvobs_engine_up{{{of}}}"] = engine_up
                others |= {f"kvobs_local_cache_tokens{{{of}}}": known} if has_core else {}
        return answers(tmp_path, others, questions.engines_down())

    assert down("1x20") == {"": 0}
    assert down("1x20", "1x9 0x11") == {"": 1}
    assert down("1x20", "1x9 0x11", "1x20") == {"": 1}, "one of two behind an exporter"
    assert down("1x2 0x18", "1x2 _x18", known="9000x2 _x18") == {"": 1}
    assert down("1x2 0x18", "1x2 _x18", "1x2 _x18", known="9000x2 _x18") == {"": 2}
    assert down("1x2 _x18", "1x2 _x18", known="9000x2 _x18") == {}, "a target that was removed"


def test_the_gain_is_what_is_saved_without_what_is_waited(tmp_path: Path) -> None:
    """A connector whose loads all fail has saved nothing yet, and has been waited for."""
    series = connector("quick", prefill_saved_seconds_total="0+180x20", load_waited_seconds_total=RISING)
    series |= connector("slow", prefill_saved_seconds_total=RISING, load_waited_seconds_total="0+180x20")
    series |= connector("failing", load_waited_seconds_total=RISING) | connector("idle")
    assert answers(tmp_path, series, questions.net_gain(*by_connector)) == {"quick": 2, "slow": -2, "failing": -1}
    assert answers(tmp_path, series, questions.net_gain()) == {"": -1}


def test_the_gain_as_a_share_of_the_time_of_engines(tmp_path: Path) -> None:
    """Two engines have ``disk``, of which one gains two seconds a second and one stands still; a third has ``cpu``."""
    series: dict[str, str] = {}
    gaining = {"prefill_saved_seconds_total": "0+180x20", "load_waited_seconds_total": RISING}
    for number, (name, counters) in enumerate((("disk", gaining), ("disk", {}), ("cpu", {}))):
        series |= on(number, connector(name, **counters))
    assert answers(tmp_path, series, questions.net_gain_share(*by_connector)) == {"disk": 1}
    assert answers(tmp_path, series, questions.net_gain_share()) == {"": pytest.approx(2 / 3)}


@pytest.mark.parametrize("name", ["vllm:prompt_tokens_total", "vllm_prompt_tokens_total"])
def test_the_loaded_share_reads_either_name_from_another_job(tmp_path: Path, name: str) -> None:
    """Prompts count once, also where preempted requests load again."""
    series = connector("cpu", load_tokens_total="0+480x20")
    asked = questions.loaded_share().replace("$job", "j")
    for at, prompted in (("i", 240), ("other:8000", 600)):
        of = f'job="another",instance="{at}",model_name="m",engine="0"'
        series[f"{name}{{{of}}}"] = f"0+{prompted}x20"
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            by_source = name.replace("tokens", "tokens_by_source")
            series[f'{by_source}{{source="{source}",{of}}}'] = "0+60x20"
    assert answers(tmp_path, series, asked) == {"": 0.25}


@pytest.mark.parametrize("host", ["gpu-1", "10.0.0.1", "[fd00::1]"])
def test_an_exporter_and_its_server_are_one_host_on_any_ports(tmp_path: Path, host: str) -> None:
    of = ',job="{}",instance="{}",model_name="{}",engine="0"}}'.format
    own = of("kvobs", f"{host}:9464", "m")
    series = {name.replace("}", own).replace("{,", "{"): values for name, values in connector("cpu").items()}
    for at, model in ((f"{host}:8000", "m"), (f"{host}:8001", "another"), ("gpu-2:8000", "m")):
        series["vllm:prompt_tokens_total{x" + '="1"' + of("vllm", at, model)] = "0+240x20"
        series["vllm:prompt_tokens_by_source_total{source" + '="external_kv_transfer"' + of("vllm", at, model)] = RISING
    assert answers(tmp_path, series, questions.loaded_share()) == {"": 0.25}


def engine(name: str, roles: dict[str, str]) -> dict[str, str]:
    """Return an engine with connectors of these roles: each loads once a second; vLLM on another port has a queue."""
    of = ',job="{}",instance="{}:{}",model_name="m",engine="0"}}'.format
    made = {f'vllm:num_requests_waiting{{x="1"{of("vllm", name, 8000)}': "7x20"}
    for connector, role in roles.items():
        labels = f'connector="{connector}"'
        made[f'kvobs_connector_info{{{labels},index="0",role="{role}"{of("kvobs", name, 9464)}'] = "1x20"
        made[f'kvobs_loads_total{{{labels},outcome="ok"{of("kvobs", name, 9464)}'] = RISING
        made[f'kvobs_held_tokens{{{labels},kind="save"{of("kvobs", name, 9464)}'] = "64x20"
    return made


SPLIT = engine("p", {"nixl": "kv_producer", "cpu": "kv_both"}) | engine("d", {"nixl": "kv_consumer", "cpu": "kv_both"})
SPLIT |= engine("d2", {"nixl": "kv_consumer"})


def test_an_engine_is_on_the_side_of_its_producer_or_consumer(tmp_path: Path) -> None:
    def loads(selection: promql.Selection) -> dict[str, float]:
        return answers(tmp_path, SPLIT, selection.rate(signals.LOADS, *by_connector))

    assert loads(questions.PREFILL) == {"nixl": 1, "cpu": 1}
    assert loads(questions.DECODE) == {"nixl": 2, "cpu": 1}
    held = questions.DECODE.gauge(signals.HELD_TOKENS, *by_connector, kind="save")
    assert answers(tmp_path, SPLIT, held) == {"nixl": 128, "cpu": 64}
    asked = questions.DECODE.rate(signals.LOADS, "instance", "connector").replace("$connector", "cpu")
    assert answers(tmp_path, SPLIT, asked, label="instance") == {"d:9464": 1}, "whichever connector is chosen"
    for side, waiting, chosen in ((questions.PREFILL_VLLM, 7, {}), (questions.DECODE_VLLM, 14, {"": 14})):
        queue = side.vllm_gauge("num_requests_waiting")
        assert answers(tmp_path, SPLIT, queue) == {"": waiting}, "vLLM's queue is that of the side's engines"
        assert answers(tmp_path, SPLIT, queue.replace("$role", "kv_consumer")) == chosen


def test_a_connector_of_an_engine_has_its_role(tmp_path: Path) -> None:
    asked = questions.with_role(SELECTION.rate(signals.LOADS, *by_engine))
    assert answers(tmp_path, engine("p", {"nixl": "kv_producer"}), asked, label="role") == {"kv_producer": 1}
    both = SPLIT | engine("b", {"nixl": "kv_both"})
    assert answers(tmp_path, both, asked.replace("$role", "kv_producer"), label="instance") == {"p:9464": 1}


def test_a_restart_is_shown_soon_and_for_a_while(tmp_path: Path) -> None:
    start = 'kvobs_start_time_seconds{job="y",instance="vllm:9464",model_name="m",engine="0"}'
    for values in ("5x8 540x11", "5x3 stale _x3 470x20", "_x8 540x11"):
        asked = f"count({questions.restarts()})"
        assert answers(tmp_path, {start: values}, asked) == {"": 1}
        assert answers(tmp_path, {start: values}, asked, "19m") == {}


def test_the_first_of_what_is_rare_is_counted(tmp_path: Path) -> None:
    """At ten minutes: stuck since nine, since long ago, and again."""
    series = {
        f'kvobs_stuck_transfers_total{{connector="{name}",rank="1"}}': values
        for name, values in {"young": "_x8 1 1 1 1", "old": "1x20", "again": "1x8 2 2 2 2"}.items()
    }
    found = answers(tmp_path, series, SELECTION.count(signals.STUCK_TRANSFERS, *by_connector))
    assert found == {"young": 1, "old": 0, "again": pytest.approx(1, rel=0.4)}
    assert answers(tmp_path, series, SELECTION.increase(signals.STUCK_TRANSFERS, *by_connector))["young"] == 0


def over_link(name: str, seconds: int, at_once: int) -> dict[str, str]:
    """Return loads of 100 MB/s over a link of 1 GB/s, which take so many seconds of each minute together."""
    counted = {"load_bytes_total": "0+6000000000x20", "load_duration_seconds_sum": f"0+{seconds}x20"}
    in_flight = f'kvobs_in_flight{{connector="{name}",kind="load"}}'
    return connector(name, link_bytes_per_second="1000000000x20", **counted) | {in_flight: f"{at_once}x20"}


LINKED = over_link("alone", 30, 1) | over_link("four", 120, 4)
LINKED |= {name.replace("alone", "unknown"): v for name, v in over_link("alone", 30, 1).items() if "link" not in name}
UNUSED = 'kvobs_unused_hit_tokens_total{{connector="disk",reason="{}"}}'.format
LOST = 'otelcol_exporter_{}{{job="otel-collector",instance="{}:8888",exporter="otlp_grpc"}}'.format
BUILD = 'kvobs_build_info{{version="{}",vllm_version="0.32"}}'.format
BOTH_ROLES = engine("a", {"nixl": "kv_both"}) | engine("b", {"nixl": "kv_both"})
OK, HALF = (
    connector("well", loads_total__ok=RISING),
    connector("half", loads_total__ok=RISING, loads_total__failed=RISING, loads_total__aborted=RISING),
)
ANSWERS: dict[str, tuple[dict[str, str], str, dict[str, float]]] = {
    "of what never failed 0, of what did nothing none": (
        connector("idle") | OK | HALF | connector("raising", call_errors_total=RISING),
        questions.failing_share(*by_connector), {"well": 0, "half": 0.5, "raising": 1},
    ),
    "the one that fails most": (OK | HALF, FAILING_MOST, {"half": 0.5}),
    "nobody, if none fails": (OK, FAILING_MOST, {"none": 0}),
    "nothing without connectors": ({}, FAILING_MOST, {}),
    "each that is configured": (
        connector("idle") | HALF, questions.connector_or_zero(questions.failures(*by_connector)), {"idle": 0, "half": 1}
    ),
    "bytes in the time of loads": (  # 600 bytes a minute in loads that took 6 seconds of it
        connector("disk", load_bytes_total="0+600x20", load_duration_seconds_sum="0+6x20") | connector("idle"),
        questions.load_speed(*by_connector), {"disk": 100},
    ),
    "a link, used at least": (LINKED, questions.link_share(), {"alone": 0.2, "four": 0.1}),
    "a link, used at most": (LINKED, questions.link_share(at_most=True), {"alone": 0.2, "four": 0.2}),
    "shares of hits": (
        connector("cpu", lookups_total__hit=RISING, lookups_total__miss="0+180x20", lookups_total__pending=RISING),
        questions.hit_share(*by_connector), {"cpu": 0.25},
    ),
    "shares of unused hit tokens": (
        connector("disk", offered_tokens_total="0+600x20")
        | {UNUSED("other_chosen"): RISING, UNUSED("aborted"): "0+600x20"},
        questions.unused_hit_share(*by_connector), {"disk": 0.1},
    ),
    "an engine with two connectors is one": (
        connector("disk", prefill_saved_seconds_total=RISING, load_waited_seconds_total=STEADY) | connector("cpu"),
        questions.net_gain_share(), {"": 1},
    ),
    "no engine": ({}, questions.net_gain_share(), {}),
    "loads that do not pay": (
        connector("slow", loads_total__ok=RISING, loads_slower_than_computing_total="0+30x20") | OK | connector("idle"),
        questions.slower_share(*by_connector), {"slow": 0.5, "well": 0},
    ),
    "a connector in two places": (
        connector("disk", loads_total__ok=RISING) | {'kvobs_connector_info{connector="disk",index="1"}': "1x20"},
        questions.with_index(SELECTION.rate(signals.LOADS, *by_connector)), {"disk": 1},
    ),
    "the oldest of what is open": (
        {OLDEST("cpu", "load"): "0x20", OLDEST("disk", "lookup"): "0x20", OLDEST("disk", "load"): "30x20",
         OLDEST("disk", "save"): "60x20"},
        questions.oldest(*by_connector), {"cpu": 0, "disk": 60},
    ),
    "a version that begins": ({BUILD("1"): "1x20", BUILD("2"): "_x8 1x20"}, questions.new_versions(), {"": 1}),
    "no version after a while": ({BUILD("1"): "1x20", BUILD("2"): "_x2 1x20"}, questions.new_versions(), {}),
    **{
        f"engines of both roles on the side {role}": (
            BOTH_ROLES, selection.rate(signals.LOADS, *by_connector), {"nixl": 2},
        )
        for role, selection in (("prefill", questions.PREFILL), ("decode", questions.DECODE))
    },
}  # fmt: skip
BY_LABEL: dict[str, tuple[dict[str, str], str, dict[str, float]]] = {
    "index": (
        connector("cpu", loads_total__ok="0+120x20"),
        questions.with_index(SELECTION.rate(signals.LOADS, *by_connector)), {"0": 2},
    ),
    "instance": (  # the name depends on the collector's settings; neither its job nor its address is an engine's
        {LOST("send_failed_spans", "a"): RISING, LOST("send_failed_spans_total", "b"): "0+120x20",
         LOST("sent_spans", "a"): "0+600x20"},
        questions.collector_losses("otelcol_exporter_send_failed_spans"), {"a:8888": 1, "b:8888": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_a_question_is_answered(case: str, tmp_path: Path) -> None:
    series, asked, expected = ANSWERS[case]
    assert answers(tmp_path, series, asked) == pytest.approx(expected)


@pytest.mark.parametrize("label", BY_LABEL)
def test_a_question_is_answered_by_a_label(label: str, tmp_path: Path) -> None:
    series, asked, expected = BY_LABEL[label]
    assert answers(tmp_path, series, asked, label=label) == pytest.approx(expected)
