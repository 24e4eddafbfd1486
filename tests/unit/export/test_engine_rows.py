"""The open series of several processes: each keeps its own count, however many there are together."""

from uuid import uuid4

from kvobs.export.engine import Engine
from kvobs.page.description import Identity
from kvobs.schema.signals import OTHER_VALUE, PEER_LOADS, SERIES_AT_MOST
from tests.support.watched import REMOTE, begin, config


def test_a_series_of_all_processes_is_kept_where_others_overflow() -> None:
    name = f"rows-{uuid4()}"
    pages = [begin(name, rank) for rank in range(3)]
    values = tuple(f"value {i}" for i in range(len(PEER_LOADS.labels)))
    few, more = ([(f"{kind} {i}", *values[1:]) for i in range(SERIES_AT_MOST)] for kind in ("known", "further"))
    for page, series in zip(pages, (few, more, few), strict=True):
        for each in series:
            page.rows.add(PEER_LOADS, REMOTE, each, 2)
    engine = Engine(f"{Identity.of(config(name)).server}-0-")
    engine.find()
    for _ in range(2):
        rows = {texts: n for (_, _, texts), n in engine.rows().items()}
        assert rows == dict.fromkeys(few, 4) | {(OTHER_VALUE,) * len(values): 2 * len(more)}
        assert list(rows)[: len(few)] == few
    pages[2].rows.add(PEER_LOADS, REMOTE, few[0], 1)
    assert engine.rows()[PEER_LOADS, REMOTE, few[0]] == 5
    for page in pages:
        page.close()


def test_many_series_of_a_connector_leave_anothers_unchanged() -> None:
    name = f"rows-{uuid4()}"
    pages = [begin(name, rank) for rank in range(2)]
    others = ("value",) * (len(PEER_LOADS.labels) - 1)
    for rank, page in enumerate(pages):
        for i in range(SERIES_AT_MOST):
            page.rows.add(PEER_LOADS, REMOTE, (f"rank {rank}: {i}", *others), 1)
        page.rows.add(PEER_LOADS, 0, ("another connector's", *others), 1)
    engine = Engine(f"{Identity.of(config(name)).server}-0-")
    engine.find()
    assert engine.rows()[PEER_LOADS, 0, ("another connector's", *others)] == 2
    for page in pages:
        page.close()
