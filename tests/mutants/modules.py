"""The modules in which faults are made, and the tests that are run against them."""

from pathlib import Path, PurePosixPath

CORE = (
    "kvobs/aggregation/aggregator.py",
    "kvobs/export/metric_families.py",
    "kvobs/export/prometheus.py",
    "kvobs/routing/completions.py",
    "kvobs/routing/isolation.py",
    "kvobs/routing/lookups.py",
    "kvobs/routing/scheduler.py",
    "kvobs/routing/worker.py",
    "kvobs/state/ledger.py",
    "kvobs/aggregation/rank_tally.py",
    "kvobs/state/transfers.py",
    "kvobs/telemetry/payload/payload.py",
    "kvobs/telemetry/payload/stats.py",
    "kvobs/telemetry/payload/summary.py",
    "kvobs/telemetry/payload/wire.py",
    "kvobs/telemetry/recording/call_spans.py",
    "kvobs/telemetry/recording/recorder.py",
    "kvobs/telemetry/requests/request_spans.py",
    "kvobs/telemetry/requests/request_traces.py",
)

WIDE = (
    "tests/unit/routing",
    "tests/unit/state",
    "tests/unit/stats",
    "tests/unit/telemetry",
    "tests/unit/children",
    "tests/unit/exporting",
    "tests/unit/export/test_totals.py",
    "tests/unit/aggregation/test_aggregation.py",
    "tests/unit/aggregation/test_aggregation_installed.py",
    "tests/unit/test_connector.py",
    "tests/unit/test_faults.py",
    "tests/unit/test_observed.py",
    "tests/unit/test_observed_loads.py",
    "tests/unit/schema/test_signals.py",
    "tests/unit/test_traced.py",
    "tests/unit/test_traced_calls.py",
)
"""The tests that a fault must survive: unit tests of what the core does. With more tests it could only be found."""

SLOW = ("tests/unit/export/test_feed.py", "tests/unit/children/test_validation.py")
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
