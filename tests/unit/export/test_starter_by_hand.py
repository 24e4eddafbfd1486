"""An exporter that was started by hand, as a sidecar, serves an engine: the engine starts none, and claims nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvobs.export import starter
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.schema.options import ExporterOption
from tests.engine.serving import eventually
from tests.support.starters import close_others
from tests.support.watched import config

ENGINE = config("an engine")
MISSING, ADDRESS = "are not exported", "serves the metrics at"


@pytest.fixture(autouse=True)
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Let a starter act at once; return what starts the exporter."""
    start = mock.Mock()
    close_others()
    monkeypatch.setattr(files, "folder", lambda: tmp_path / "pages")
    for name, value in {"start": start, "LOOK_S": 0.01, "AUTO_AFTER_S": 0.0}.items():
        monkeypatch.setattr(starter, name, value)
    return start


@pytest.fixture
def by_hand(hasty: mock.Mock) -> Iterator[files.Lock]:
    lock = files.Lock(files.folder(), f"{Identity.of(ENGINE).server}{files.EXPORTER}")
    yield lock
    lock.release()


def run(option: ExporterOption, caplog: pytest.LogCaptureFixture) -> None:
    """Let a starter look for a while, or until it has logged something."""
    with caplog.at_level(logging.INFO):
        tended = starter.of_scheduler(option, ENGINE)
        eventually(lambda: bool(caplog.messages), 0.5)
        tended.close()


def test_nothing_is_missing_that_an_exporter_by_hand_shows(
    by_hand: files.Lock, caplog: pytest.LogCaptureFixture
) -> None:
    assert by_hand.is_mine
    run(None, caplog)
    assert MISSING not in caplog.text


def test_without_any_exporter_the_metrics_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    run(None, caplog)
    assert MISSING in caplog.text


def test_no_address_is_logged_of_an_exporter_that_another_serves(
    by_hand: files.Lock, hasty: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    assert by_hand.is_mine
    run("auto", caplog)
    assert ADDRESS not in caplog.text
    hasty.assert_not_called()


def test_the_address_of_its_own_exporter_is_logged(hasty: mock.Mock, caplog: pytest.LogCaptureFixture) -> None:
    run("auto", caplog)
    assert ADDRESS in caplog.text
    assert eventually(lambda: hasty.called, 20)
