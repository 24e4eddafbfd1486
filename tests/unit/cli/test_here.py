"""What is read of the engines on this host, without an address."""

from uuid import uuid4

import pytest

from kvobs.cli.here import running
from kvobs.cli.scrapes import EndedError
from kvobs.schema import signals
from tests.support import watched
from tests.support.exporting import HIT
from tests.support.page_files import page_folder
from tests.support.waiting import eventually
from tests.support.watched import begin
from tests.support.written import Pages


def test_two_servers_of_one_model_without_a_port_are_both_there() -> None:
    model = f"model-{uuid4()}"
    pages = [begin(f"here-{uuid4()}", None, model=model) for _ in range(2)]
    found = {name: read for name, read in running().items() if name.startswith(model)}
    assert list(found) == [model, f"{model}, process {pages[1].process.pid}"]
    starts = {
        value
        for read in found.values()
        for (metric, _), value in read().values.items()
        if metric == "kvobs_start_time_seconds"
    }
    assert len(starts) == 2
    for page in pages:
        page.close()


def test_the_engines_of_a_server_are_read_together_and_live() -> None:
    with page_folder():
        first = Pages(None, 0, port=8001)
        second = Pages(None, of=first, index=1, port=8001)
        ((name, read),) = running().items()
        assert name == "tiny at port 8001"
        for n in (1, 2):
            first.add(HIT, 1, writer=1)
            second.add(HIT, 10)
            hits = {
                dict(labels)["engine"]: value
                for (metric, labels), value in read().values.items()
                if metric == signals.LOOKUPS.name
            }
            assert hits == {"0": n, "1": 10 * n}


def test_an_ended_engine_is_not_listed_and_cannot_be_read() -> None:
    with page_folder(), watched.process("here", None, "hangs") as hanging:
        ((_, read),) = running().items()
        assert eventually(lambda: any(name == signals.CALL_IN_PROGRESS.name for name, _ in read().values))
        hanging.kill()
        with pytest.raises(EndedError, match="its engine has ended"):
            read()
        assert running() == {}
