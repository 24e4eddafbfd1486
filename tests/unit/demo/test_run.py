"""The parts of a run of `kvobs demo` that a stack of containers needs; tests/compose has the whole."""

import urllib.request
from io import BytesIO
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import pytest

from kvobs.demo import run, server


def test_the_exporter_is_asked_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a last scrape it need not serve the last numbers any longer."""
    ask = mock.Mock(side_effect=[BytesIO(), BytesIO(), URLError("refused")])
    monkeypatch.setattr(urllib.request, "urlopen", ask)
    run.see_exporter_end("http://127.0.0.1:9464/metrics")
    assert ask.call_args_list == [mock.call("http://127.0.0.1:9464/metrics", timeout=1)] * 3


def test_an_exporter_that_gives_no_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "ARRIVE_S", 0.3)
    monkeypatch.setattr(server.Server, "metrics", lambda _self: [])
    config = run.with_exporter(run.multi_connector(run.host_memory()), "127.0.0.1", 0)
    made = server.Server(tmp_path, tmp_path / "log", config)
    with pytest.raises(server.ServerError, match=r"kvobs's exporter, http://127.0.0.1:\d+/metrics, gave no answer: "):
        run.readings(made)
