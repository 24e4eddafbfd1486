"""What is in progress is counted once a request, with its age and the tokens that it holds, against a plain list."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvobs.state.in_progress import InProgress

REQUESTS = st.sampled_from("abcd")
EVENTS = st.one_of(
    st.tuples(st.just("begin"), REQUESTS, st.integers(0, 3)), st.tuples(st.just("end"), REQUESTS, st.just(0))
)


@given(st.lists(EVENTS, max_size=30))
def test_it_holds_what_has_begun_and_not_ended(events: list[tuple[str, str, int]]) -> None:
    found: list[tuple[str, int, int]] = []
    in_progress = InProgress()
    for now_ns, (what, request, tokens) in enumerate(events, 1):
        is_in = request in [one[0] for one in found]
        assert (request in in_progress) is is_in
        if what == "end":
            in_progress.end(request)
            found = [one for one in found if one[0] != request]
        else:
            in_progress.begin(request, now_ns, tokens)
            if not is_in:
                found.append((request, now_ns, tokens))
        assert len(in_progress) == len(found)
        assert in_progress.tokens == sum(one[2] for one in found)
        assert in_progress.oldest_ns == (found[0][1] if found else 0)
        half = now_ns // 2
        assert list(in_progress.begun_before(half)) == [one[0] for one in found if one[1] <= half]
