import logging
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs import log


def test_a_thing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert log.once("k", logging.WARNING, "said %d", 1) is True
    assert log.once("k", logging.WARNING, "said %d", 2) is False
    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [("said 1", False)]
    assert log.line("x" * 200) == "x" * 120 + "..."
    assert log.line("a\x1b[2J\nb\ud800 é\\") == "a\\x1b[2J\\nb\\ud800 é\\", "what a terminal would obey is escaped"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=30))
def test_an_outage_has_a_pair_of_lines_in_ten_minutes(attempts: list[tuple[bool, int]]) -> None:
    """Its end is logged exactly if its begin was, and never before another success."""
    now, lines = 0.0, list[tuple[str, float]]()
    outage = log.Outage(lambda: now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.log, "log", lambda *_: lines.append(("begin", now)))
        patch.setattr(log.log, "info", lambda *_: lines.append(("end", now)))
        for fails, later in attempts:
            now += later
            if fails:
                outage.begins(logging.ERROR, "fails")
            else:
                outage.ends("works")
    kinds = [kind for kind, _ in lines]
    assert kinds == ["begin", "end"] * (len(kinds) // 2) + ["begin"] * (len(kinds) % 2)
    begins = [at for kind, at in lines if kind == "begin"]
    assert all(later - before >= 600 for before, later in pairwise(begins))
    failures = [i for i, (fails, _) in enumerate(attempts) if fails]
    assert bool(begins) is bool(failures), "the first failure is logged"
    has_worked = bool(failures) and not all(fails for fails, _ in attempts[failures[0] :])
    assert ("end" in kinds) is has_worked


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("errno")


def test_an_error_whose_text_raises_is_shown_by_its_class() -> None:
    assert log.line(UnspeakableError()) == "a value of type UnspeakableError whose str() failed"


def test_remembered_messages_are_bounded_kind_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that names ever new things does not keep what others have to say out of the log."""
    for key, times in {"k{}": 128, "kind:{}": 128, "kind:{}:more": 128, "kind:{:0300}": 1}.items():
        log.forget()
        assert sum(log.once(key.format(i), logging.DEBUG, "again") for i in range(5000)) == times
        assert log.once("other:1", logging.DEBUG, "recorded")
    assert max(len(key) for logged in log._logged.values() for key in logged) <= 256


@given(st.text(st.characters() | st.characters(categories=["Cc", "Cs", "Zl"]), max_size=40), st.integers(0, 30))
def test_external_text_is_shown_in_one_short_line(text: str, at_most: int) -> None:
    shown = log.line(text, at_most)
    assert shown.isprintable()
    assert len(shown) <= at_most + len("...")
    if text.isprintable() and len(text) <= at_most:
        assert shown == text
