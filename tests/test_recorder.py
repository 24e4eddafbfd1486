"""What is taken, over any number of takes, adds up to what was counted."""

import hypothesis.strategies as st
from hypothesis import given

from kvobs.recorder import WIDTH, Recorder

counted = st.tuples(st.integers(0, 2), st.integers(0, WIDTH - 1), st.integers(0, 1000))


@given(st.lists(st.none() | counted))
def test_differences_add_up_to_the_counts(events: list[tuple[int, int, int] | None]) -> None:
    """None stands for a take."""
    recorder = Recorder(3)
    expected: dict[int, int] = {}
    taken: dict[int, int] = {}
    for event in [*events, None]:
        if event is None:
            flat = recorder.take()
            assert 0 not in flat[1::2]
            for slot, n in zip(flat[::2], flat[1::2], strict=True):
                taken[slot] = taken.get(slot, 0) + n
        else:
            child, own, n = event
            recorder.count(child, own, n)
            expected[child * WIDTH + own] = expected.get(child * WIDTH + own, 0) + n
    assert taken == {slot: n for slot, n in expected.items() if n}
    assert recorder.take() == []
