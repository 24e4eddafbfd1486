"""What vLLM's scheduler plans is read as what it is: against the requests themselves, over whole lives of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.routing import gains
from kvobs.routing.step_work import work_of
from kvobs.state.step_times import Work
from kvobs.testing import BLOCK, Rig, Script


class Planned:
    """Notes every step's work as it is read, and as the requests have it."""

    def __init__(self, rig: Rig, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[Work | None, Work]] = []
        self.rig = rig
        patch.setattr(gains, "work_of", self.read)

    def read(self, output: Any) -> Work | None:
        tokens = pairs = decodes = context = prefills = 0
        for request_id, n in output.num_scheduled_tokens.items():
            request = self.rig.scheduler.requests[request_id]
            before = request.num_computed_tokens
            if before < request.num_prompt_tokens:
                prefills += 1
                tokens += n
                pairs += sum(range(before + 1, before + n + 1))
            else:
                decodes += n
                context += before
        found = work_of(output)
        self.steps.append((found, Work(tokens, pairs, decodes, context, prefills)))
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
    assert any(truth.tokens and truth.decodes for _, truth in working), "mixed"
    assert any(truth.tokens == 100 - truth.decodes for _, truth in working), "chunked"
    assert any(not truth.tokens for _, truth in working), "decodes alone"
    assert {found for found, truth in planned.steps if not any(truth)} <= {None}


def test_nothing_is_learned_from_what_a_preemption_computes_again(monkeypatch: pytest.MonkeyPatch, a: Script) -> None:
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
