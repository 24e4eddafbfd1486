"""Kvobs's own faults, contained as in production: a test takes and counts them, and no thread of an earlier one."""

from threading import current_thread

import pytest

from kvobs import faults


def contain(patch: pytest.MonkeyPatch) -> None:
    """Contain faults, which are raised on under pytest; threads that pages and API servers have take none."""
    take = faults.take
    patch.setattr(faults, "is_under_pytest", lambda: False)
    patch.setattr(faults, "take", lambda: {} if current_thread().name.startswith("kvobs-") else take())
