"""What vLLM's scheduler plans is read as what it is: against the requests themselves, over whole lives of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.prediction.compute_cost import Work
from kvobs.routing import gains
from kvobs.routing.step_work import work_of
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
        self.steps.append((found, (tokens, pairs, decodes, context, prefills)))
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
    sizes = {(tokens, decodes) for _, (tokens, _pairs, decodes, _context, _prefills) in working}
    assert any(tokens and decodes for tokens, decodes in sizes), "mixed"
    assert any(tokens == 100 - decodes for tokens, decodes in sizes), "chunked"
    assert any(not tokens for tokens, _ in sizes), "decodes alone"
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
