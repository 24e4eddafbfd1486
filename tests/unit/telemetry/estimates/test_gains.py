"""Each load is weighed once: what it saved against what its request waited; and the work of vLLM's steps is read."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.transfers import NO_RESULT, Gain, Load
from kvobs.telemetry.estimates import gains
from kvobs.telemetry.estimates.compute_cost import Work
from kvobs.telemetry.estimates.gains import Gains, StepTimes, step_limits, work_of
from kvobs.telemetry.events import TelemetryObserver
from kvobs.testing import BLOCK, Rig, Script
from tests.support.contexts import request
from tests.support.numbers import taken
from tests.support.reports import took

MS = 1_000_000
TOKEN_NS, STEP_NS = 100_000, 5 * MS


class Engine(TelemetryObserver):
    """An engine whose steps take 5 ms and 0.1 ms a token, on the test's clock, and what is announced of its loads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**18
        self.weighed: list[tuple[str, Gain]] = []
        self.recorder = Recorder(2)
        self.gains = Gains(self.recorder, self, 2048, 1)
        for clock in ("wall_ns", "perf_counter_ns"):
            patch.setattr(gains, clock, lambda: self.now_ns)
        patch.setattr(gains, "work_of", lambda work: work)

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        self.weighed.append((request_id, gain))

    def step(self, tokens: int, context: int = 0, *, loads: bool = False, more_ns: int = 0) -> None:
        self.now_ns += 7 * MS
        work: Any = (tokens, tokens * context + tokens * (tokens + 1) // 2, 0, 0)
        self.gains.step_begun(work, self.now_ns, loads=loads)
        self.now_ns += STEP_NS + tokens * TOKEN_NS + more_ns
        self.gains.step_ended()

    def learn(self) -> None:
        for i in range(100):
            self.step(1 + 37 * (i % 41))

    def resume(self, request_id: str) -> None:
        self.gains.allocated(request(request_id), NO_RESULT, None, 0)

    def load(self, tokens: int = 1000, **more: Any) -> Load:
        return Load(1, tokens, more.pop("is_async", True), 1, opened_ns=self.now_ns, **more)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(monkeypatch)
    engine.learn()
    return engine


def test_an_async_load_is_weighed_when_its_request_resumes(engine: Engine) -> None:
    load = engine.load()
    engine.now_ns += 30 * MS
    engine.gains.load_ended("r", load)
    assert engine.weighed == []
    engine.now_ns += 12 * MS
    engine.resume("r")
    engine.resume("r")
    ((request_id, gain),) = engine.weighed
    assert (request_id, gain.waited_ns, gain.resume_ns) == ("r", 42 * MS, 12 * MS)
    assert gain.saved_ns == pytest.approx(1000 * TOKEN_NS, rel=0.02)
    assert not gain.is_slower
    assert len(engine.gains) == 0


def test_a_sync_load_is_weighed_at_its_end(engine: Engine) -> None:
    engine.gains.load_ended("r", engine.load(is_async=False, arrived=took(3 * MS, 4 * MS)))
    ((_, gain),) = engine.weighed
    assert (gain.waited_ns, gain.resume_ns) == (4 * MS, None)
    assert gain.saved_ns == pytest.approx(1000 * TOKEN_NS, rel=0.02)


@pytest.mark.parametrize(("lost", "echo", "kept"), [(None, False, 0), (400, False, 600), (400, True, 0)])
def test_a_failed_load_saves_what_vllm_keeps_of_it(engine: Engine, lost: int | None, echo: bool, kept: int) -> None:
    load = engine.load(failed_on={0}, lost_tokens=lost, must_report_failure=echo)
    engine.now_ns += 20 * MS
    engine.gains.load_ended("r", load)
    engine.resume("r")
    ((_, gain),) = engine.weighed
    assert gain.waited_ns == 20 * MS
    assert gain.saved_ns == pytest.approx(kept * TOKEN_NS, rel=0.02)
    assert gain.is_slower == (not kept)


def test_loads_of_ended_requests_are_not_weighed(engine: Engine) -> None:
    engine.gains.load_ended("aborted", engine.load(aborted=True))
    engine.gains.load_ended("ended", engine.load())
    engine.gains.request_ended(request("ended"))
    for request_id in ("aborted", "ended"):
        engine.resume(request_id)
    assert engine.weighed == []
    assert len(engine.gains) == 0


def test_before_there_is_an_estimate_only_the_wait_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    load = engine.load()
    engine.now_ns += MS
    engine.gains.load_ended("r", load)
    engine.resume("r")
    assert engine.weighed == [("r", Gain(None, MS, 0, prefills=0))]
    assert not engine.weighed[0][1].is_slower


def test_nothing_is_learned_from_steps_that_load(engine: Engine) -> None:
    before = engine.gains._cost.saved(1000, 0, 1)
    for _ in range(100):
        engine.step(1000, loads=True, more_ns=500 * MS)
    assert engine.gains._cost.saved(1000, 0, 1) == before


def test_tokens_after_a_load_are_computed_either_way(engine: Engine) -> None:
    """Beyond a step's budget the load saves whole steps, too."""
    load = engine.load(tokens=2048, local_tokens=16, rest_tokens=100)
    engine.gains.load_ended("r", load)
    engine.resume("r")
    assert engine.weighed[0][1].saved_ns == pytest.approx(2048 * TOKEN_NS + STEP_NS, rel=0.03)


def test_prefills_and_the_time_of_steps_are_recorded(engine: Engine) -> None:
    engine.gains.look()
    taken(engine.recorder)
    engine.step(1000)
    engine.gains.look()
    prefills, steps = signals.slot(signals.ESTIMATE_PREFILLS), signals.slot(signals.STEP_SECONDS)
    counts = taken(engine.recorder).counts
    assert counts[prefills] == 1
    assert counts[steps] == pytest.approx(105 * MS, abs=2)
    for learned in (0, 2 * 105 * MS):  # by the step after a look
        engine.step(1000)
        engine.gains.look(goes_on=True)
        assert taken(engine.recorder).counts.get(steps, 0) == pytest.approx(learned, abs=2)


@pytest.mark.parametrize(("threshold", "chunk"), [(0, 2048), (512, 512), (4096, 2048)])
def test_the_limits_of_steps_are_vllms(threshold: int, chunk: int) -> None:
    scheduling = SimpleNamespace(max_num_batched_tokens=2048, long_prefill_token_threshold=threshold)
    assert step_limits(SimpleNamespace(scheduler_config=scheduling, max_concurrent_batches=3)) == (chunk, 3)
    assert step_limits(SimpleNamespace(scheduler_config=scheduling)) == (chunk, 1)
    del scheduling.long_prefill_token_threshold  # as in other versions
    assert step_limits(SimpleNamespace(scheduler_config=scheduling)) == (2048, 1)


class Planned:
    """Notes every step's work as it is read, and as the requests have it."""

    def __init__(self, rig: Rig, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[Work | None, Work]] = []
        self.rig = rig
        patch.setattr(gains, "work_of", self.read)

    def read(self, output: Any) -> Work | None:
        tokens = pairs = decodes = context = 0
        for request_id, n in output.num_scheduled_tokens.items():
            request = self.rig.scheduler.requests[request_id]
            before = request.num_computed_tokens
            if before < request.num_prompt_tokens:
                tokens += n
                pairs += sum(range(before + 1, before + n + 1))
            else:
                decodes += n
                context += before
        found = work_of(output)
        self.steps.append((found, (tokens, pairs, decodes, context)))
        return found


@pytest.mark.parametrize("lag", [0, 1])
def test_prefills_chunks_and_decodes(monkeypatch: pytest.MonkeyPatch, a: Script, lag: int) -> None:
    a.offers |= {"loaded": (3 * BLOCK, True)}
    rig = Rig("kvobs", a, lag=lag, blocks=256)
    rig.scheduler.max_num_scheduled_tokens = 100
    planned = Planned(rig, monkeypatch)
    for i, tokens in enumerate((1, 17, 250, 90)):
        rig.add(f"r{i}", tokens=tokens, max_tokens=4 + i)
    rig.add("loaded", tokens=4 * BLOCK + 1)
    rig.run(4)
    a.say(0, received="loaded")
    rig.run(14)
    assert not rig.scheduler.requests
    working = [(found, truth) for found, truth in planned.steps if any(truth)]
    assert len(working) > 6
    assert all(found == truth for found, truth in working)
    sizes = {(tokens, decodes) for _, (tokens, _pairs, decodes, _context) in working}
    assert any(tokens and decodes for tokens, decodes in sizes), "mixed"
    assert any(tokens == 100 - decodes for tokens, decodes in sizes), "chunked"
    assert any(not tokens for tokens, _ in sizes), "decodes alone"
    assert {found for found, truth in planned.steps if not any(truth)} <= {None}


def test_nothing_is_learned_from_a_preemptions_recomputation(monkeypatch: pytest.MonkeyPatch, a: Script) -> None:
    rig = Rig("kvobs", a, blocks=16)
    planned = Planned(rig, monkeypatch)
    for request_id in ("r", "q"):
        rig.add(request_id, tokens=5 * BLOCK, max_tokens=5 * BLOCK)
    rig.run(8 * BLOCK)
    unlike = [found for found, truth in planned.steps if any(truth) and found != truth]
    assert unlike
    assert set(unlike) == {None}


def test_nothing_is_learned_from_an_encoders_input(a: Script) -> None:
    rig = Rig("kvobs", a)
    rig.add("r")
    output = rig.scheduler.schedule()
    assert work_of(output) is not None
    output.scheduled_encoder_inputs = {"r": [0]}
    assert work_of(output) is None


ONE, TWO, THREE = (1, 1, 0, 0), (2, 3, 0, 0), (0, 0, 3, 30)


@pytest.mark.parametrize(
    ("in_flight", "events", "ends"),
    [
        (1, [(100, ONE), 130, (1000, TWO), 1005], [(30, ONE), (5, TWO)]),
        (2, [(100, ONE), (101, TWO), 130, (131, THREE), 140, 155], [(30, ONE), (10, TWO), (15, THREE)]),
        (2, [(100, None), (101, ONE), 130, 140], [None, (10, ONE)]),
        (1, [1, (5, ONE), 7], [None, (2, ONE)]),
        (1, [(100, ONE), (200, TWO), 210, 220], [(10, TWO), None]),
    ],
    ids=["after a pause", "scheduled ahead", "nothing to learn", "an output without a step", "a lost output"],
)
def test_a_step_lasts_to_its_output(in_flight: int, events: list[Any], ends: list[Any]) -> None:
    """A pair is a step that is scheduled, a number the time of an output."""
    times, found = StepTimes(in_flight), []
    for event in events:
        if isinstance(event, int):
            found.append(times.end(event))
        else:
            times.steps.append(event)
    assert found == ends
    assert not times.steps
