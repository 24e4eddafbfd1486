"""Alerts and boards with an engine on two hosts: both are scraped, or that of EngineCore alone."""

import json
import re
from pathlib import Path

import pytest

from kvobs.schema.signals import LOCAL_CACHE_TOKENS
from tests.support import boards
from tests.support.promtool import promtool
from tests.unit.dashboards.evaluation import BY_NAME, beside, case, engine, expected, passes, quiet_from, quietly
from tests.unit.dashboards.scenes import SCENES, hosts
from tests.unit.dashboards.scenes.scene import UP, Fires, Series
from tests.unit.dashboards.scenes.telemetry import cost

pytestmark = pytest.mark.tools

FOLDER = Path(__file__).parents[3] / "dashboards/generated/boards"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
OF_STORES = sorted(name.replace("[:_]", ":") for name in boards.NOT_OURS if name.startswith(("lmcache", "master_")))
CORE = LOCAL_CACHE_TOKENS.name  # of hosts with EngineCore only
OF_TARGETS = [name for name in SCENES if name != "KvobsJobMissing"]  # a job with such a host is not missing


def of_ranks(series: Series = hosts.RANKS) -> dict[str, str]:
    return engine(series, {"instance": f"{hosts.OTHER}:8000"})


def moved(found: object) -> object:
    """Return an alert as it is about the other host."""
    moved: object = json.loads(json.dumps(found).replace(hosts.HEAD, hosts.OTHER))
    return moved


@pytest.mark.parametrize("name", OF_TARGETS)
def test_an_alert_fires_once_with_ranks_on_another_host(name: str, tmp_path: Path) -> None:
    alert = BY_NAME[name]
    tests = [
        case(
            beside(alert, SCENES[name]) | of_ranks() | engine(fires.series),
            quietly(name, {fires.at: [expected(alert, fires, fires.says)]}),
        )
        for fires in SCENES[name].fires
    ]
    passes(tests, tmp_path, name)


@pytest.mark.parametrize("name", OF_TARGETS)
def test_an_alert_is_quiet_with_ranks_on_another_host(name: str, tmp_path: Path) -> None:
    scenes = SCENES[name]
    quiet = (scenes.healthy, *scenes.quiet)
    passes([case(of_ranks() | engine(series), quietly(name, quiet_from(0))) for series in quiet], tmp_path, name)


@pytest.mark.parametrize("name", hosts.OF_RANKS)
def test_an_alert_is_about_the_host_that_has_the_trouble(name: str, tmp_path: Path) -> None:
    alert, tests = BY_NAME[name], []
    for fires in SCENES[name].fires:
        series = of_ranks({**{key: v for key, v in hosts.RANKS.items() if key not in fires.series}, **fires.series})
        of_head = engine({hosts.INFO: UP, CORE: "9000+0x400"})
        tests.append(case(of_head | series, quietly(name, {fires.at: [moved(expected(alert, fires, fires.says))]})))
    passes(tests, tmp_path, name)


def test_the_cost_of_remote_ranks_is_divided_by_their_number(tmp_path: Path) -> None:
    name = "KvobsTelemetryCost"
    alert, head = BY_NAME[name], engine({**cost("0+1x400", ranks=4), CORE: "9000+0x400"})
    alone = engine({**cost("0+1x400"), CORE: "9000+0x400"}, {"instance": "gpu-3:8000"})
    fires = Fires({}, "40m", "Telemetry uses 30% of one core in one process of engine 0 of gpu-1:8000 (org/model a&b).")
    record = 'kvobs_overhead_seconds_total{stage="record"}'
    tests = [
        case(head | alone | of_ranks({**hosts.RANKS, record: "0+9x400"}), quietly(name, quiet_from(0))),
        case(
            head | alone | of_ranks({**hosts.RANKS, record: "0+36x400"}),
            quietly(name, {fires.at: [moved(expected(alert, fires, fires.says))]}),
        ),
    ]
    passes(tests, tmp_path, name)


def asked(series: Series, folder: Path) -> dict[str, list[str]]:
    """Return what promtool answers to each query of the boards, which must be none that it can't answer."""
    queries = {}
    for uid, board in BOARDS.items():
        for where, expr in boards.queries(board):
            filled = re.sub(r"\$(job|instance|model_name|engine|connector|role)\b", ".+", expr)
            queries[f"{uid}: {where}"] = filled.replace("$__rate_interval", "4m").replace("$cluster", ".*")
    wanted = [{"labels": '{nobody="x"}', "value": 0}]  # nothing meets that: promtool prints what there is
    content = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [{"expr": e, "eval_time": "10m", "exp_samples": wanted} for e in queries.values()],
            }
        ]
    }
    (folder / "tests.json").write_text(json.dumps(content))
    said = promtool("test", "rules", folder / "tests.json")
    got = re.findall(r"^\s+got:\s*(.*)$", said.stdout + said.stderr, re.MULTILINE)
    assert len(got) == len(queries), [line for line in (said.stdout + said.stderr).splitlines() if "err:" in line]
    return {
        where: sorted(re.findall(r"\{[^}]*\} \S+?(?=,\s|$)", found)) for where, found in zip(queries, got, strict=True)
    }


def test_boards_count_an_engine_on_two_hosts_once(tmp_path: Path) -> None:
    """A query of what EngineCore counts has one answer; of what each host says it may have a row for each."""
    served = hosts.of_all()
    vllm = {
        f"vllm:{name}": "0+6x40" for name in ("num_requests_running", "num_requests_waiting", "prompt_tokens_total")
    }
    head = engine({"up": "1+0x40", **served, **vllm, **dict.fromkeys(OF_STORES, "1+1x40")})
    both = head | of_ranks({"up": "1+0x40", **hosts.of_all(hosts.BY_RANKS | hosts.BY_EACH_HOST)})
    alone, together = asked(head, tmp_path), asked(both, tmp_path)
    expressions = {f"{uid}: {where}": e for uid, board in BOARDS.items() for where, e in boards.queries(board)}
    names = {signal.name for signal in hosts.BY_RANKS}
    once = [where for where, e in expressions.items() if not any(name in e for name in names)]
    assert len(once) > len(expressions) / 2
    assert sum(bool(found) for found in alone.values()) > 0.8 * len(alone), "there is something to count twice"
    for where in once:
        rows = [row for row in together[where] if f'instance="{hosts.OTHER}' not in row]
        assert rows == alone[where], where
