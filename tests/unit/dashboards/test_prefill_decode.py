"""The board *Prefill and decode*: the order of its rows, and what stands beside each other."""

import json

from dashboards.__main__ import FILES
from tests.support.boards import panels, variables

BOARD = json.loads(FILES["boards/kvobs-prefill-decode.json"]())
PANELS = {panel["title"]: panel for panel in panels(BOARD)}


def line(title: str) -> list[str]:
    """Return the panels beside this one, from left to right."""
    at = {name: (panel["gridPos"]["y"], panel["gridPos"]["x"]) for name, panel in PANELS.items()}
    return sorted((name for name in at if at[name][0] == at[title][0]), key=lambda name: at[name])


def text(*titles: str) -> str:
    return json.dumps([target["expr"] for title in titles for target in PANELS[title]["targets"]])


def test_rows_are_in_the_order_of_a_requests_way() -> None:
    asked = [
        "request_queue_time_seconds", "request_prefill_time_seconds", "kvobs_save_hold_seconds",
        "kvobs_load_duration_seconds", "kvobs_load_resume_delay_seconds", "inter_token_latency_seconds",
    ]  # fmt: skip
    whole = text(*(title for title, panel in PANELS.items() if panel["type"] == "timeseries"))
    at = [whole.index(name) for name in asked]
    assert at == sorted(at)
    assert [row["title"][0] for row in BOARD["panels"] if row["type"] == "row"] == ["1", "2", "3", "4"]
    assert not any(row.get("collapsed") for row in BOARD["panels"])


def test_vllms_kv_cache_usage_stands_beside_the_save_hold() -> None:
    beside = text(*line("Save hold on the prefill side (p99)"))
    for name in ("kvobs_save_hold_seconds", "vllm[:_]kv_cache_usage_perc", "kvobs_held_tokens"):
        assert name in beside


def test_both_sides_show_vllms_queue() -> None:
    for side, other in (("Prefill", "kv_consumer"), ("Decode", "kv_producer")):
        queue = text(f"{side}: requests waiting and running (dashed)")
        assert "vllm[:_]num_requests_waiting" in queue
        assert f'role=\\"{other}\\"' in queue, "these engines are left out"


def test_the_role_is_chosen_after_everything_else() -> None:
    role = variables(BOARD, "query")[-1]
    assert role["name"] == "role"
    assert role["query"]["query"].startswith('label_values(kvobs_connector_info{cluster=~"$cluster",')
    assert all('role=~"$role"' in target["expr"] for panel in PANELS.values() for target in panel["targets"])
