"""The modules in which faults are made, and the tests that are run against them."""

from pathlib import Path, PurePosixPath

CORE = (
    "kvobs/aggregation.py",
    "kvobs/exporting/metric_families.py",
    "kvobs/exporting/prometheus.py",
    "kvobs/routing/completions.py",
    "kvobs/routing/isolation.py",
    "kvobs/routing/lookups.py",
    "kvobs/routing/scheduler.py",
    "kvobs/routing/worker.py",
    "kvobs/state/ledger.py",
    "kvobs/state/rank_tally.py",
    "kvobs/state/transfers.py",
    "kvobs/stats/payload.py",
    "kvobs/stats/stats.py",
    "kvobs/stats/summary.py",
    "kvobs/stats/wire.py",
    "kvobs/telemetry/call_spans.py",
    "kvobs/telemetry/recorder.py",
    "kvobs/telemetry/request_spans.py",
    "kvobs/telemetry/request_traces.py",
)

WIDE = (
    "tests/unit/routing",
    "tests/unit/state",
    "tests/unit/stats",
    "tests/unit/telemetry",
    "tests/unit/children",
    "tests/unit/exporting",
    "tests/unit/exporter/test_totals.py",
    "tests/unit/test_aggregation.py",
    "tests/unit/test_aggregation_installed.py",
    "tests/unit/test_connector.py",
    "tests/unit/test_faults.py",
    "tests/unit/test_observed.py",
    "tests/unit/test_observed_loads.py",
    "tests/unit/test_signals.py",
    "tests/unit/test_traced.py",
    "tests/unit/test_traced_calls.py",
)
"""The tests that a fault must survive: unit tests of what the core does. With more tests it could only be found."""

SLOW = ("tests/unit/exporting/test_feed.py", "tests/unit/children/test_validation.py")
"""Tests of other modules that would take most of the time."""


def all_tests(root: Path) -> list[str]:
    """Return all files of tests that are run."""
    found = [root / path for path in WIDE]
    files = [file for path in found for file in ([path] if path.is_file() else sorted(path.glob("test_*.py")))]
    return [name for file in files if (name := file.relative_to(root).as_posix()) not in SLOW]


def own_tests(module: str) -> str:
    """Return the file of a module's own tests, found from its name."""
    path = PurePosixPath(module)
    return str(PurePosixPath("tests/unit") / path.parent.relative_to("kvobs") / f"test_{path.name}")
