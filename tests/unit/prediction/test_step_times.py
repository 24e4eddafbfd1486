"""A step's time is the engine's own: no pause before it, and no step beside it."""

from __future__ import annotations

from kvobs.prediction.step_times import StepTimes

ONE, TWO, THREE = (1, 1, 0, 0, 1), (2, 3, 0, 0, 1), (0, 0, 3, 30, 0)


def test_a_step_lasts_from_its_scheduling_to_its_output_and_a_pause_before_it_does_not_count() -> None:
    times = StepTimes(1)
    times.steps.append((100, ONE))
    assert times.end(130) == (30, ONE)
    times.steps.append((1000, TWO))
    assert times.end(1005) == (5, TWO)


def test_steps_that_are_scheduled_ahead_last_from_output_to_output() -> None:
    times = StepTimes(2)
    times.steps.append((100, ONE))
    times.steps.append((101, TWO))
    assert times.end(130) == (30, ONE)
    times.steps.append((131, THREE))
    assert times.end(140) == (10, TWO)
    assert times.end(155) == (15, THREE)
    assert len(times) == 0


def test_of_a_step_with_nothing_to_learn_only_its_end_counts() -> None:
    times = StepTimes(2)
    times.steps.append((100, None))
    times.steps.append((101, ONE))
    assert times.end(130) is None
    assert times.end(140) == (10, ONE)


def test_an_output_without_a_step_is_none() -> None:
    times = StepTimes(1)
    assert times.end(1) is None
    times.steps.append((5, ONE))
    assert times.end(7) == (2, ONE)


def test_after_a_lost_output_the_steps_are_their_own_again() -> None:
    """A synchronous engine has one step in flight, whatever has become of the one before."""
    times = StepTimes(1)
    times.steps.append((100, ONE))
    times.steps.append((200, TWO))
    assert times.end(210) == (10, TWO)
    assert times.end(220) is None
