"""Real engines whose best-effort store is not there when they start: they serve without it, from the first request."""

import time
from pathlib import Path

import pytest

from tests.connectors.servers import traffic
from tests.connectors.servers.served import LMCACHE, MOONCAKE, STORE, Kind, serving
from tests.connectors.servers.traffic import Answers
from tests.engine.serving import ServedEngine

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", [LMCACHE, MOONCAKE], ids=lambda kind: kind.name)
def test_an_engine_without_its_store_answers(
    kind: Kind, served_engine: ServedEngine, tmp_path: Path, expected: Answers
) -> None:
    """Mooncake's worker is not built then, and a lookup would wait for that worker's answer for ever."""
    begin = time.monotonic()
    with serving(served_engine, tmp_path, kind.server(tmp_path), kind, is_best_effort=True) as engine:
        started = time.monotonic()
        answers = traffic.ask_all(engine.server, traffic.PROMPTS)
        print(f"\nup after {started - begin:.1f} s; {len(answers)} answers in {time.monotonic() - started:.1f} s")
        assert traffic.wrong(answers, expected) == []
        assert engine.total("kvobs_quarantines_total") >= 1
        assert f"connector '{STORE}'" in engine.server.log.read_text(errors="replace")
        assert engine.loads == engine.total("kvobs_internal_errors_total") == 0
