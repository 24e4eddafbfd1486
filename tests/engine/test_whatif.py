"""What `kvobs whatif` predicts of loads from one run of a real engine is what real runs with those settings do.

How near it comes to the times to first token is measured by ``python -m tests.bench whatif``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.cli.whatif.history import History
from tests.support.steered_runs import OTHERS, REQUESTS, Other, compared, record

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXACT = ("policy longest", "far only", "minimum of near 300")
"""Settings under which no choice depends on times."""


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    return record(model, tmp_path_factory.mktemp("was") / "run", Other(), at_once=3)


def test_under_the_recorded_settings_every_choice_is_repeated(run: History) -> None:
    found = compared(run, Other())
    assert found.repeated == found.known == found.lookups == REQUESTS
    assert found.predicted == found.requests == REQUESTS
    assert found.model.tokens == found.was.tokens
    assert all(seconds > 0 for seconds in found.model.first_tokens_s)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_predicted_is_loaded_by_a_run_with_those_settings(
    name: str, run: History, model: Path, tmp_path: Path
) -> None:
    predicted = compared(run, OTHERS[name])
    real = compared(record(model, tmp_path / "run", OTHERS[name], at_once=3), OTHERS[name])
    assert predicted.known == real.lookups == REQUESTS
    assert predicted.changed > REQUESTS // 3
    assert predicted.what_if.tokens == real.was.tokens != predicted.was.tokens
