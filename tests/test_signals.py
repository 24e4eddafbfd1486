"""The table of metrics is fit for Prometheus."""

import re

from kvobs.signals import COUNTERS, LOADS, SLOT, SLOTS, slot


def test_names_are_unique_and_follow_the_conventions() -> None:
    names = [signal.name for signal in COUNTERS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"kvobs_[a-z_]+_total", name) for name in names)


def test_label_values_are_closed_sets_of_words() -> None:
    for signal in COUNTERS:
        for label, values in signal.labels.items():
            assert re.fullmatch(r"[a-z]+", label)
            assert values
            assert all(re.fullmatch(r"[a-z]+", value) for value in values)


def test_every_metric_says_what_it_counts() -> None:
    assert all(signal.help.endswith(".") for signal in COUNTERS)


def test_slots_and_series_are_one_to_one() -> None:
    assert len(SLOTS) == len(SLOT)
    for i, (signal, values) in enumerate(SLOTS):
        assert slot(signal, *values) == i
    assert slot(LOADS, "async", "ok") != slot(LOADS, "sync", "ok")
