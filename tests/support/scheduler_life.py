"""A scheduler's side under random requests, reports and aborts."""

from typing import Any

import hypothesis.strategies as st
import pytest

from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import child_config

RANKS = 2
HEADERS = (None, *({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-{flags}"} for flags in ("00", "01", "no")))
KV_OFFERS = st.sampled_from([(0, False), (BLOCK, True), (3 * BLOCK, True), (2 * BLOCK, False), (None, False)])
request_ids = st.sampled_from([f"r{i}" for i in range(5)])
actions = st.one_of(
    st.tuples(st.just("add"), request_ids, st.tuples(KV_OFFERS, KV_OFFERS), st.sets(st.sampled_from([0, 1]))),
    st.tuples(st.just("abort"), request_ids),
    st.tuples(
        st.just("say"),
        st.sampled_from([0, 1]),
        st.integers(0, RANKS - 1),
        st.sampled_from(["received", "failed", "saved"]),
        request_ids,
    ),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


class Life:
    """Runs actions; whatever a child does beyond them is what a correct child must do in the end."""

    def __init__(self, policy: str, blocks: int, lag: int, level: str, cls: str = "ScriptedConnector") -> None:
        self.scripts = (Script("a"), Script("b"))
        kvobs = {"load_policy": policy, "tracing": {"level": level}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
            connectors = [child_config(script, cls) for script in self.scripts]
            self.rig = Rig("kvobs", connectors=connectors, ranks=RANKS, kvobs=kvobs, blocks=blocks, lag=lag)
        self.ids: dict[str, str] = {}  # by a request's name in the plan; vLLM never uses an id twice

    def act(self, action: Any) -> None:
        match action:
            case ("add", name, offers, promises):
                if self.ids.get(name) in self.rig.scheduler.requests:
                    return
                request_id = self.ids[name] = f"{name}#{len(self.scripts[0].offers)}"
                for i, script in enumerate(self.scripts):
                    script.offers[request_id] = [offers[i], (0, False)] if offers[i][0] is None else offers[i]
                    script.promises -= {request_id}
                    script.promises |= {request_id} if i in promises else set()
                self.rig.add(request_id, max_tokens=3, trace_headers=HEADERS[len(self.ids) % len(HEADERS)])
            case ("abort", name):
                self.rig.abort(self.ids.get(name, name))
            case ("say", child, rank, word, name):
                self.scripts[child].say(rank, **{word: self.ids.get(name, name)})
            case ("step", n):
                self.rig.run(n)

    def end(self) -> None:
        """Let every child report all it owes, on every rank, until the engine is idle."""
        for _ in range(12):
            for request_id in list(self.rig.scheduler.requests):
                owner = self.rig.connector._side.ledger.arrive(request_id).owner
                for i, script in enumerate(self.scripts):
                    script.offers[request_id] = (0, False)
                    for rank in range(RANKS):
                        script.say(rank, received=request_id if i == owner else "", saved=request_id)
            self.rig.run(3)
