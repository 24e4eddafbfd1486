"""What the panels about reuse answer: the curve, the mark on it, and parts that add up to the prompts' tokens."""

from pathlib import Path

import pytest

from dashboards.questions import SELECTION
from dashboards.reuse import TOKENS, computed_tokens, hits_by_size, hits_of_connectors, hits_of_vllm
from kvobs.schema import signals
from tests.support.promtool import HOST, answers

pytestmark = pytest.mark.tools

ENGINE = "{" + HOST.removeprefix(",") + "}"
BUCKET, SOURCE = "kvobs_reuse_distance_tokens_bucket", "vllm:prompt_tokens_by_source_total"
# 600 tokens a minute in blocks: 60 were used within 1,024 tokens, 240 within the largest size.
CURVE = {
    f'{BUCKET}{{le="1024.0"}}': "0+60x20",
    f'{BUCKET}{{le="3.3554432e+07"}}': "0+240x20",
    f'{BUCKET}{{le="+Inf"}}': "0+600x20",
    f"kvobs_reuse_distance_tokens_count{ENGINE}": "0+600x20",
    f"kvobs_prompt_tail_tokens_total{ENGINE}": "0+60x20",
    'kvobs_connector_info{connector="one",index="0"}': "1x20",
}


def of_vllm(local: int, loaded: int) -> dict[str, str]:
    """Return vLLM's own counters of a prompt's 660 tokens a minute."""
    parts = {"local_cache_hit": local, "external_kv_transfer": loaded}
    series = {f'{SOURCE}{{source="{source}"}}': f"0+{n}x20" for source, n in parts.items()}
    return series | {f"vllm:prompt_tokens_total{ENGINE}": "0+660x20"}


def test_the_curve_is_the_share_of_tokens_up_to_each_size(tmp_path: Path) -> None:
    shares = answers(tmp_path, CURVE, hits_by_size(), label="le")
    assert shares == pytest.approx({"1024.0": 0.1, "3.3554432e+07": 0.4})
    # vLLM's own cache is marked at its size with what it served.
    series = CURVE | of_vllm(local=66, loaded=0) | {f"kvobs_local_cache_tokens{ENGINE}": "5000x20"}
    assert answers(tmp_path, series, hits_of_vllm(), label="le") == pytest.approx({"5000": 0.1})


@pytest.mark.parametrize(("of_vllms", "share"), [(of_vllm(local=60, loaded=30), 0.15), ({}, 0.05)])
def test_a_connector_is_marked_at_its_stated_size(of_vllms: dict[str, str], share: float, tmp_path: Path) -> None:
    loads = {f'kvobs_load_tokens_total{{connector="{connector}"}}': "0+30x20" for connector in ("one", "of no size")}
    series = CURVE | of_vllms | loads | {'kvobs_capacity_tokens{connector="one"}': "70000x20"}
    assert answers(tmp_path, series, hits_of_connectors(), label="le") == pytest.approx({"70000": share})


@pytest.mark.parametrize(
    ("local", "loaded", "first", "again"),
    [
        (100, 60, 360, 80),
        (0, 0, 360, 240),
        (240, 0, 360, 0),
        (0, 600, 0, 0),  # with prefill elsewhere what is loaded is used here for the first time
    ],
)
def test_the_parts_add_up_to_the_tokens(tmp_path: Path, local: int, loaded: int, first: int, again: int) -> None:
    def per_minute(expr: str) -> float:
        series = {f"kvobs_loadable_tokens_total{ENGINE}": f"0+{240 - local}x20"} if local < 240 else {}
        return 60 * answers(tmp_path, CURVE | of_vllm(local, loaded) | series, expr).get("", 0)

    assert [per_minute(expr) for expr in computed_tokens()] == pytest.approx([first, again])
    tail = per_minute(SELECTION.rate(signals.PROMPT_TAIL_TOKENS))
    assert local + loaded + first + again + tail == pytest.approx(per_minute(TOKENS) + tail) == pytest.approx(660)
