"""The board *Prefill and decode*: engines of one role can be chosen."""

import json
from pathlib import Path

import pytest

from dashboards.__main__ import FILES
from tests.support.boards import panels, variables
from tests.support.promtool import answers

BOARD = json.loads(FILES["boards/kvobs-prefill-decode.json"]())
PANELS = {panel["title"]: panel for panel in panels(BOARD)}


def test_role_is_chosen_after_everything_else() -> None:
    role = variables(BOARD, "query")[-1]
    assert role["name"] == "role"
    assert role["query"]["query"].startswith('label_values(kvobs_connector_info{cluster=~"$cluster",')
    assert all('role=~"$role"' in target["expr"] for panel in PANELS.values() for target in panel["targets"])


@pytest.mark.tools
def test_a_bad_pair_is_a_bad_row(tmp_path: Path) -> None:
    nixl = 'connector="nixl"'
    loads = {("a:1", "ok"): 60, ("b:1", "ok"): 30, ("b:1", "failed"): 30}
    series = {f'kvobs_connector_info{{{nixl},role="kv_consumer"}}': "1x20"}
    series |= {f'kvobs_peer_loads_total{{{nixl},peer="{p}",outcome="{o}"}}': f"0+{n}x20" for (p, o), n in loads.items()}
    series |= {f'kvobs_peer_load_seconds_total{{{nixl},peer="{p}"}}': f"0+{n}x20" for p, n in (("a:1", 6), ("b:1", 30))}
    of_pairs = PANELS["Pairs of engines, most failures first"]["targets"]
    failed, per_second, mean = (answers(tmp_path, series, target["expr"], label="peer") for target in of_pairs)
    assert failed == pytest.approx({"a:1": 0, "b:1": 0.5})
    assert per_second == pytest.approx({"a:1": 1, "b:1": 1})
    assert mean == pytest.approx({"a:1": 0.1, "b:1": 1})


@pytest.mark.tools
@pytest.mark.parametrize(
    ("instances", "queued"),
    [
        ({"kv_producer": ("a:9464", "a:8000"), "kv_consumer": ("b:9464", "b:8000")}, 3),
        # Of one host, by names, as docs/metrics.md has it; and by ports, which do not say what belongs together.
        ({"kv_producer": ("a-prefill", "a-prefill"), "kv_consumer": ("a-decode", "a-decode")}, 3),
        ({"kv_producer": ("a:9464", "a:8000"), "kv_consumer": ("a:9465", "a:8001")}, 8),
    ],
)
def test_servers_of_one_host_need_names(instances: dict[str, tuple[str, str]], queued: float, tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for (role, (exporter, server)), waiting in zip(instances.items(), (3, 5), strict=True):
        engine = 'model_name="m",engine="0"'
        info = f'kvobs_connector_info{{job="kvobs",instance="{exporter}",{engine},connector="nixl",role="{role}"}}'
        series |= {info: "1x20"}
        series |= {f'vllm:num_requests_waiting{{job="vllm",instance="{server}",{engine}}}': f"{waiting}x20"}
    of_prefill = PANELS["Requests waiting and running (dashed)"]["targets"][0]
    assert answers(tmp_path, series, of_prefill["expr"]) == {"": queued}
