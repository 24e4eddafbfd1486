"""What is compared of loads, and with what, from the bytes in caches to the numbers: see ``test_observed``."""

import json
from functools import partial
from typing import Any

import pytest

from kvobs.testing import BLOCK, Script
from tests.support.cached import Cached
from tests.support.observed import KV, Observed
from tests.support.rig import entry_for, forget_unused
from tests.support.traced import Traced

SHARE = {"sample_ratio": 1.0}
PROMPT = 4 * BLOCK + 1


@pytest.fixture(autouse=True)
def _cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Observed, "make_rig", Cached)


def verified(engine: Observed) -> dict[tuple[str, ...], float]:
    return {labels: n for labels, n in engine.series("kvobs_verified_blocks_total").items() if n}


def test_a_block_loaded_in_part_after_a_preemption_is_not_noted(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """Else the wrong bytes that the load brought would be right ones from then on."""
    engine = Observed(monkeypatch, a, b, ranks=1, verify=SHARE)
    engine.rig.add("r", max_tokens=20)
    engine.step(2)
    b.offers["r"] = (2 * BLOCK + 3, False)
    engine.rig.fill["r", 0] = {2: 9.0}
    engine.rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step(2)
    assert verified(engine) == {("two", "match"): 2}
    engine.rig.abort("r")
    engine.step()
    forget_unused(engine.rig)
    b.offers["again"] = (3 * BLOCK, False)
    engine.rig.fill["again", 0] = {2: 9.0}
    engine.rig.add("again", prompt_of="r")
    engine.step(3)
    assert verified(engine) == {("two", "match"): 4, ("two", "mismatch"): 1}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("failed_on", [0, 1])
def test_what_was_computed_after_a_failed_load_is_forgotten(
    failed_on: int, lag: int, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """On all ranks, as each has computed with wrong numbers: else the right ones would be a mismatch from then on."""
    monkeypatch.setattr("kvobs.connector.wiring.step_limits", lambda _: (1024, 1 + lag))  # as with async scheduling
    engine = Observed(monkeypatch, a, b, verify=SHARE, rig={"lag": lag})
    b.offers["r"] = (2 * BLOCK, False)
    for rank in (0, 1):
        engine.rig.fill["r", rank] = {2: 9.0, 3: 9.0}
    engine.rig.add("r", max_tokens=9)
    b.bad_blocks[failed_on] = {1}
    engine.step(1 + lag)
    assert engine.value("kvobs_loads_total", "two", mode="sync", outcome="failed") == 1
    before = verified(engine)
    engine.step(2)
    engine.rig.abort("r")
    engine.step(1 + lag)
    forget_unused(engine.rig)
    b.offers["again"] = (4 * BLOCK, False)
    engine.rig.add("again", prompt_of="r")
    engine.step(3)
    after = verified(engine)
    assert after.keys() <= {("two", "unknown")}
    assert after["two", "unknown"] - before.get(("two", "unknown"), 0) == 8  # of both ranks


def test_a_load_that_was_given_up_is_not_compared(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """Its blocks are computed again; what the connector writes is nobody's."""
    monkeypatch.setattr("tests.support.observed.entry_for", partial(entry_for, cls="BestEffortConnector"))
    engine = Observed(monkeypatch, a, b, verify=SHARE, best_effort=["two"])
    b.offers["r"] = KV
    engine.rig.add("r", max_tokens=99)
    engine.step()
    b.raises = {"wait_for_save": TimeoutError("no answer")}
    engine.step(2)
    b.raises = {}
    engine.step(seconds=11)
    engine.step(2)
    assert engine.value("kvobs_loads_total", "two", mode="async", outcome="failed") == 1
    for rank in (0, 1):
        b.say(rank, received="r")
    engine.step(2)
    assert verified(engine) == {}


PREFILL = [("traced", {"blocks", "traceparent"}), ("not traced", {"blocks"})]


@pytest.mark.parametrize(("way", "sent"), PREFILL)
def test_decode_compares_with_what_the_prefill_engine_computed(
    way: str, sent: set[str], monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """Of each rank with the same rank's blocks; whether or not there is a trace beside them."""
    peers = [entry_for(a, "PeerConnector", kv_role="kv_consumer"), entry_for(b, "PeerConnector")]
    prefill_class = Traced if way == "traced" else Observed
    prefill = prefill_class(monkeypatch, a, b, connectors=peers, verify=SHARE)
    b.params["p"] = {"remote": 1}
    prefill.rig.fill["p", 1] = {0: 7.0}
    prefill.rig.add("p", max_tokens=3)
    for _ in range(3):
        prefill.step()
        given = [output.kv_transfer_params for output in prefill.rig.request_outputs if output.finished]
    params = json.loads(json.dumps(given[0]))
    assert (params.pop("remote"), params["kvobs"].keys()) == (1, sent)

    decode = Traced(monkeypatch, a, b, connectors=peers, verify={"sample_ratio": 1e-18})
    b.offers["p"] = (4 * BLOCK, True)
    decode.rig.fill["p", 1] = {0: 7.0, 3: 0.0}

    def load(**more: Any) -> None:
        decode.rig.add("p", max_tokens=1, **more)
        decode.step(2)
        for rank in (0, 1):
            decode.rig.fill_blocks(rank, "p")
            b.say(rank, received="p")
        decode.step(4)

    load(**params)
    compared = {("two", "match"): 7, ("two", "mismatch"): 1}
    assert verified(decode) == compared
    assert decode.series("kvobs_corrupt_blocks_total") == {("two", "1"): 1}
    assert decode.series("kvobs_malformed_contexts_total") == {}
    assert [len(span.links) for span in decode.spans("kv.load two")] == [way == "traced"]
    # The next request of this id brings no fingerprints.
    forget_unused(decode.rig)
    load()
    assert decode.series("kvobs_loads_total") == {("two", "async", "ok"): 2}
    assert verified(decode) == compared
