"""With default options each connector is called as vLLM's own MultiConnector would call it, but for what is declared.

Set KVOBS_LIVES to a number to try so many other lives, drawn anew each time.
"""

import os
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transparency.comparator import hangs_in_vllm, judge
from tests.transparency.engine import live
from tests.transparency.life import draw, from_seed
from tests.transparency.sweep import SEEDS, Findings, quiet, sweep

MORE = int(os.environ.get("KVOBS_LIVES", "0"))
SHRINKABLE = 20

HAPPENS = (
    *("async load", "sync load", "load after a load", "load after a local hit", "load with dcp", "not yet"),
    *("load into several groups", "load of a preempted request", "load reported in the output", "failed load"),
    *(
        "bad blocks of an async load",
        "bad blocks of a sync load",
        "bad blocks in another's load",
        "load unchosen",
        "bad blocks of a load unchosen",
        "save promised",
        "save promised by several",
    ),
    *("save withdrawn", "partial tail accepted", "step of a sliding window", "step of a pause", "preempted"),
    *("aborted, WAITING_FOR_REMOTE_KVS", "aborted, RUNNING", "reset, True", "reset, False", "step of a pipeline"),
    *("step by priority", "step with drafts", "input streamed in", "id used again", "ended by a connector's exception"),
)
"""What must have happened in lives that are to prove anything."""


@pytest.fixture(scope="module")
def findings() -> Findings:
    """What came of these lives."""
    return sweep(SEEDS)


def test_connectors_are_called_as_by_vllms_own_router(findings: Findings) -> None:
    assert not findings.faulty, f"{findings.faulty} of {findings.lives} lives\n\n" + "\n\n".join(findings.faults[:5])


def test_all_that_matters_happens_in_these_lives(findings: Findings) -> None:
    assert {what for what in HAPPENS if findings.seen[what] < 3} == set()
    assert findings.calls > 100 * findings.lives


def test_most_lives_are_compared_to_their_end(findings: Findings) -> None:
    assert sum(findings.stock.values()) < 0.35 * findings.lives


@pytest.mark.parametrize(
    "options",
    [
        {"load_policy": "longest", "request_report": True, "tracing": {"level": "calls"}},
        {"wait_for": "earlier", "tracing": {"level": "requests"}},
    ],
    ids=str,
)
def test_nothing_is_left_with_other_options(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests, blocks, or entries in what kvobs keeps of requests: ``live`` looks at all of them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with quiet():
        for life in map(from_seed, range(MORE or 24)):
            run = live(life, "kvobs", **options)
            assert run.raised or run.error is None, f"seed {life.seed}: {run.error}"
            assert run.left is None or hangs_in_vllm(life, run), f"seed {life.seed}: {run.left}"


@settings(
    max_examples=MORE or SHRINKABLE,
    derandomize=not MORE,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
@given(st.randoms(use_true_random=False))
def test_a_life_that_differs_is_made_small(random: Random) -> None:
    """The same as above; hypothesis finds the smallest life that differs."""
    verdict = judge(draw(random))
    assert verdict.fault is None, f"{verdict.fault}\nthe life: {verdict.life!r}"
