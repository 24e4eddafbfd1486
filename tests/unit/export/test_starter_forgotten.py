"""An engine that is forgotten, as a test's is, starts no exporter."""

import gc
import threading
from typing import Any
from unittest import mock

import pytest

from kvobs.export import starter
from kvobs.export.starter import Starter
from kvobs.page import files
from kvobs.schema.options import ExporterOptions
from kvobs.testing import Rig, Script
from tests.engine.serving import eventually
from tests.support.starters import close_others


def threads() -> int:
    return sum(thread.name == "kvobs-starter" for thread in threading.enumerate())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Let a starter look all the time; return what starts the exporter."""
    start = mock.Mock()
    close_others()
    monkeypatch.setattr(starter, "start", start)
    monkeypatch.setattr(starter, "LOOK_S", 0.01)
    return start


def test_a_forgotten_starter_ends(hasty: mock.Mock) -> None:
    gc.collect()
    before, asked = threads(), threading.Event()

    def is_needed() -> bool:
        asked.set()
        return False

    made: list[Any] = [Starter("a server", ExporterOptions(), is_needed)]
    assert asked.wait(20)
    made.clear()
    gc.collect()
    assert eventually(lambda: threads() <= before, 20)
    hasty.assert_not_called()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_of_a_test_starts_none(ranks: int, hasty: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "AUTO_AFTER_S", 0.0)
    held = mock.Mock(side_effect=files.is_held)
    monkeypatch.setattr(files, "is_held", held)
    rig = Rig("kvobs", Script("rigged"), ranks=ranks)
    assert eventually(lambda: held.called, 20)
    assert not eventually(lambda: hasty.called, 0.5)
    rig.connector.shutdown()
