"""Two scrapes say what was between them, and series are summed and sorted by their labels."""

import hypothesis.strategies as st
from hypothesis import given

from kvobs.export.numbers import Numbers, Series, Values, by_owner, change, has_restarted

OF_LOADS = tuple(f"kvobs_load_duration_seconds_{part}" for part in ("bucket", "sum"))
NAMES = (*OF_LOADS, "kvobs_lookups_total", "kvobs_overhead_seconds_total", "kvobs_in_flight")
VALUES = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.sampled_from("abc").map(lambda c: frozenset({("connector", c)}))),
    st.integers(0, 9).map(float),
)


@given(VALUES, VALUES)
def test_growth_is_never_negative(old: dict[Series, float], new: dict[Series, float]) -> None:
    changed = change(old, new)
    assert changed.keys() == new.keys()
    for series, value in changed.items():
        if series[0] == "kvobs_in_flight":
            assert value == new[series]
        else:
            assert value == max(0, new[series] - (0 if has_restarted(old, new) else old.get(series, 0)))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=8))
def test_growth_adds_up_over_scrapes_and_restarts(turns: list[tuple[bool, int]]) -> None:
    """Only a restart after which as much was counted by the next scrape can't be seen."""
    loads: Series = ("kvobs_loads_total", frozenset())
    before: Values | None = None
    counted, lost, value = 0.0, 0.0, 0.0
    for is_restart, n in turns:
        value = n if is_restart else value + n
        after = {loads: value}
        counted += change(before, after)[loads]
        if before is not None and is_restart and value >= before[loads]:
            lost += before[loads]
        before = after
    assert counted == sum(n for _, n in turns) - lost


def test_a_restart_shows_in_whole_numbers_and_missing_series() -> None:
    def of(**values: float) -> dict[Series, float]:
        return {(f"kvobs_{name}", frozenset()): value for name, value in values.items()}

    assert has_restarted(of(loads_total=2), of(loads_total=1))
    assert has_restarted(of(load_duration_seconds_bucket=2), of(load_duration_seconds_bucket=1))
    assert has_restarted(of(loads_total=2, in_flight=1), of(in_flight=1))
    assert not has_restarted(of(loads_total=2), of(loads_total=2, saves_total=1))
    assert not has_restarted(of(in_flight=2), of(in_flight=1))
    # Of several processes, floats may be added up in another order.
    assert not has_restarted(of(load_stall_seconds_sum=2), of(load_stall_seconds_sum=2 - 1e-12))


def test_samples_are_summed_over_labels_that_are_not_asked_for() -> None:
    loads = {
        ("loads", frozenset({("engine", e), ("outcome", o)})): n
        for e, o, n in (("0", "ok", 1), ("1", "ok", 2), ("1", "failed", 4))
    }
    numbers = Numbers.of(loads.items())
    assert [numbers.sum("loads"), numbers.sum("loads", outcome="ok"), numbers.sum("loads", engine="2")] == [7, 3, 0]
    assert numbers.sum("saves") == 0


def test_series_belong_to_their_labels_engine_and_connector() -> None:
    values: Values = {("up", frozenset()): 1, ("up", frozenset({("engine", "1"), ("connector", "a")})): 2}
    assert {owner: numbers.sum("up") for owner, numbers in by_owner(values).items()} == {("", ""): 1, ("1", "a"): 2}
