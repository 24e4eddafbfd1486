"""What ``kvobs whatif`` predicts of times to first token, beside real runs with the predicted settings."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from docs import pages
from kvobs.cli.whatif.comparison import P50, P95, Column
from kvobs.demo.model import make_model
from tests.bench.report import Budget, Line, Part
from tests.support.steered_runs import OTHERS, Other, compared, record

AT_ONCE = (1, 3)
WITHIN = Budget(25)
"""Per cent that a prediction may be off in the median."""


class Case(NamedTuple):
    """Times to first token in ms, and tokens: of the recorded run, predicted from it, and of a real one."""

    at_once: int
    settings: str
    share: float
    was: float
    predicted: float
    real: float
    predicted_tokens: int
    real_tokens: int

    @property
    def error(self) -> float:
        """How far the prediction is from the real time, in per cent of it."""
        return abs(self.predicted / self.real - 1) * 100


def measure(say: Callable[[str], None]) -> Part:
    """Record a run of a real engine, predict others from it, and run them; once with several requests at once."""
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
        model = make_model(Path(folder) / "model")
        for at_once in AT_ONCE:
            history = record(model, Path(folder) / f"was-{at_once}", Other(), at_once)
            for number, (name, other) in enumerate(OTHERS.items()):
                say(f"  {name}, {at_once} at once")
                predicted = compared(history, other)
                real = compared(record(model, Path(folder) / f"{at_once}-{number}", other, at_once), other)
                for share in (P50, P95):
                    was, what_if, shown = (
                        _ms(column, share) for column in (predicted.was, predicted.what_if, real.was)
                    )
                    tokens = predicted.what_if.tokens.total(), real.was.tokens.total()
                    cases.append(Case(at_once, name, share, was, what_if, shown, *tokens))
    pages.write(pages.FOLDER / "whatif.md", "run", "whatif", _table(cases))
    lines = []
    for at_once in AT_ONCE:
        errors = tuple(case.error for case in cases if case.at_once == at_once)
        lines.append(Line(f"{at_once} at once", "%", statistics.median(errors), errors, budget=WITHIN))
    return Part("Time to first token as kvobs whatif predicts it: the difference from a real run", lines)


def _ms(column: Column, share: float) -> float:
    seconds = column.first_token_s(share)
    assert seconds is not None
    return 1000 * seconds


def _table(cases: list[Case]) -> str:
    head = ["settings", "requests at once", "was, ms", "predicted, ms", "really, ms", "tokens predicted", "really"]
    rows = []
    for p50, p95 in zip(cases[::2], cases[1::2], strict=True):
        times = [f"{getattr(p50, what):.0f} / {getattr(p95, what):.0f}" for what in ("was", "predicted", "real")]
        rows.append([p50.settings, str(p50.at_once), *times, f"{p50.predicted_tokens:,}", f"{p50.real_tokens:,}"])
    return pages.table(head, rows)
