"""A prefill and a decode engine, host memory beside NIXL: clients that leave, unread blocks, a killed engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import entry, host_memory, multi_connector
from kvobs.testing.server import CORES, HOST, claim_port, cores, kill_group
from tests.connectors.faults import record
from tests.connectors.servers.stores import CHUNK
from tests.engine.pair import LOOPBACK_ONLY, PREFILL, Pair, hand_over
from tests.engine.prometheus import expression, scraping
from tests.engine.readings import Growth
from tests.engine.serving import TOKENS, ServedEngine, eventually, total
from tests.gpu_path.servers.served import (
    CLIENTS,
    LONG,
    PROMPTS,
    Answers,
    Asked,
    Served,
    look_back,
    round_of,
    serving,
    stream,
)

pytestmark = pytest.mark.timeout(900)  # engines are started within it

LEASE_S = 12
NIXL = {**entry("NixlConnector", num_threads=0, kv_lease_duration=LEASE_S), "kv_buffer_device": "cpu"}
UNREAD = 3


@pytest.fixture(scope="module")
def sides(served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    config = multi_connector(NIXL, host_memory(), names=["nixl", "host"])
    config["kv_connector_extra_config"]["kvobs"]["verify"] = {"sample_ratio": 1}
    with ExitStack() as stack:
        found = {}
        for side, core in zip(("prefill", "decode"), cores(2), strict=True):
            channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(claim_port(0))}
            env = {**LOOPBACK_ONLY, **channel, CORES: str(core)}
            found[side] = stack.enter_context(serving(served_engine, tmp_path_factory.mktemp(side), config, env=env))
        yield found


@pytest.fixture(scope="module")
def pair(sides: dict[str, Served]) -> Pair:
    return Pair(sides["prefill"].server, sides["decode"].server)


def prefill(pair: Pair, text: str) -> dict[str, Any]:
    """Return what the decode engine is given to find a prompt's blocks."""
    params: dict[str, Any] = pair.prefill.complete(text, 1, kv_transfer_params=PREFILL).raw["kv_transfer_params"]
    return params


def send(pair: Pair, one: Asked) -> tuple[int, ...] | None:
    """Hand a request over, and return its answer; a client that leaves before a token does so in both engines."""
    if one.leaves_at is None:
        return hand_over(pair, one.prompt)[1].tokens
    if not one.leaves_at:
        stream(pair.prefill, one.prompt, LONG, 0, kv_transfer_params=PREFILL)
    stream(pair.decode, one.prompt, LONG, one.leaves_at, kv_transfer_params=prefill(pair, one.prompt))
    return None


def test_answers_and_counts_of_both_sides_are_right(sides: dict[str, Served], pair: Pair, expected: Answers) -> None:
    asked: list[Asked] = []
    answers = []
    for number in range(3):
        for server in (pair.prefill, pair.decode):
            server.reset_prefix_cache(timeout=60)
        asked += (sent := round_of(number))
        with ThreadPoolExecutor(CLIENTS) as pool:
            got = list(pool.map(lambda one: send(pair, one), sent))
        answers += [(one.prompt, tokens) for one, tokens in zip(sent, got, strict=True) if tokens is not None]
    for name, side in sides.items():
        look_back(f"NIXL pair, the {name} engine", side, asked, answers, expected)
        assert total(side.server, "kvobs_saves_total", connector="nixl") == side.promises("nixl")
    assert sides["decode"].counted()["NixlConnector"].loads >= len(answers)
    assert sides["prefill"].counted()["OffloadingConnector"].loads > 0


def test_saves_without_a_reader_are_in_nixls_expired_count(sides: dict[str, Served], pair: Pair) -> None:
    with Growth(pair.prefill, connector="nixl") as grown:
        for text in PROMPTS[:UNREAD]:
            prefill(pair, text)
        assert eventually(lambda: total(pair.prefill, "kvobs_in_flight", kind="save") == 0)
    assert grown("kvobs_saves_total", outcome="ok") == grown("kvobs_saves_total") == UNREAD
    assert grown("vllm:nixl_num_kv_expired_reqs_total", connector="nixl") == UNREAD
    assert grown("kvobs_save_hold_seconds_sum") >= UNREAD * LEASE_S * 0.9


def test_blocks_read_after_their_lease_are_named_in_a_good_load(pair: Pair, tmp_path: Path) -> None:
    """The prefill engine has filled them again; it says what it had computed, an earlier time."""
    text, others = PROMPTS[UNREAD], [text[::-1] for text in PROMPTS]
    for server in (pair.prefill, pair.decode):
        server.reset_prefix_cache(timeout=60, external=True)
    for _ in range(3):  # a rank's fingerprints reach its scheduler a step later, and are in the params of the third
        with Growth(pair.decode, connector="nixl") as right:
            pair.decode.complete(text, TOKENS, kv_transfer_params=prefill(pair, text))
            assert right.reaches(1, "kvobs_verified_blocks_total"), "not verified"
        pair.decode.reset_prefix_cache(external=True)
    matches = right("kvobs_verified_blocks_total", outcome="match")
    assert matches == right("kvobs_verified_blocks_total")
    record("NixlConnector", "none", 0, {"match": matches}, ranks=[], at="two engines")
    targets = [f"{HOST}:{server.port}" for server in (pair.prefill, pair.decode)]
    jobs = f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: {targets}}}]}}]"
    hidden = expression("KvobsLoadsHideFailures")
    with (
        scraping(tmp_path, jobs) as prometheus,
        Growth(pair.prefill) as there,
        Growth(pair.decode, connector="nixl") as here,
    ):
        params = prefill(pair, text)
        assert there.reaches(1, "vllm:nixl_num_kv_expired_reqs_total")
        for other in others:
            pair.prefill.complete(other, 1)
        assert prometheus.value(hidden) is None
        pair.decode.complete(text, TOKENS, kv_transfer_params=params)
        pair.prefill.complete(others[0], 1)  # NIXL learns in a step that it was read
        assert eventually(lambda: prometheus.value(hidden) is not None), "no alert"
        assert here.reaches(1, "kvobs_corrupt_blocks_total"), "not verified"
    assert there("vllm:nixl_num_notifications_after_expiry_total") == 1
    assert here("kvobs_loads_total", outcome="ok") == here("kvobs_loads_total") == 1
    blocks = here("kvobs_load_tokens_total") // CHUNK
    assert here("kvobs_verified_blocks_total", outcome="mismatch") == here("kvobs_verified_blocks_total") == blocks
    assert "connector 'nixl' loaded wrong bytes on rank 0" in pair.decode.log.read_text()
    record(
        "NixlConnector",
        "read after its lease had ended",
        int(blocks),
        {"mismatch": blocks},
        ranks=["0"],
        at="two engines",
    )


def test_decode_computes_what_a_dead_prefill_engine_cannot_give(
    sides: dict[str, Served], pair: Pair, expected: Answers
) -> None:
    pair.decode.reset_prefix_cache(external=True)
    asked = [Asked(text) for text in PROMPTS[:UNREAD]]
    handed = {text: prefill(pair, text) for text in PROMPTS[:UNREAD]}
    assert pair.prefill.process is not None
    kill_group(pair.prefill.process.pid)
    with Growth(pair.decode, connector="nixl") as grown, ThreadPoolExecutor(CLIENTS) as pool:
        got = list(
            pool.map(
                lambda each: pair.decode.complete(each[0], TOKENS, kv_transfer_params=each[1]).tokens, handed.items()
            )
        )
    answers = list(zip(handed, got, strict=True))
    look_back("NIXL pair, the decode engine, prefill killed", sides["decode"], asked, answers, expected)
    assert grown("kvobs_loads_total", outcome="failed") == grown("kvobs_loads_total") == UNREAD
