"""Imports go one way: each module imports from lower tiers, and within its own package nothing in a circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvobs

PACKAGE = Path(kvobs.__file__).parent

TIERS = (
    {"version", "log", "hooks", "findings", "proc", "signal_types"},
    {"signals", "deviations", "host"},
    {"topology", "blocks", "faults", "spans", "options"},
    {"state", "config"},
    {"telemetry"},
    {"stats"},
    {"children"},
    {"aggregation", "exporting", "routing"},
    {"connector", "exporter"},
    {"plugin", "demo"},
    {"cli", "testing"},
)
"""Modules and packages of kvobs, the lowest first: nothing imports those of the last one.

``__init__`` imports the connector late and stands outside."""

RANK = {name: rank for rank, names in enumerate(TIERS) for name in names}

NEEDS_NO_VLLM = (
    *("version", "log", "hooks", "findings", "proc", "host", "signal_types", "signals", "deviations", "topology"),
    *("faults", "spans"),
    *("options", "config"),
    "plugin",
)
PURE = ("state", "telemetry")
WITHOUT_TORCH = (
    *("exporting.span_export", "exporting.destinations", "stats.flush_rule", "stats.summary", "stats.histogram"),
    *("stats.scrapes", "children.specs", "children.validation", "routing.lookups", "cli.check.check"),
)


def modules() -> Iterator[tuple[str, Path]]:
    """Yield each module's name without ``kvobs.``, and its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imported(path: Path) -> set[str]:
    """Return the modules of kvobs that a file imports, at its top or later."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvobs":
            base = (node.module or "").partition(".")[2]
            inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {name if name in MODULES else base for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("kvobs.")}
    return found


def all_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def top(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_has_a_tier() -> None:
    assert {top(name) for name in MODULES if name} == set(RANK)


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_a_module_imports_from_lower_tiers_only(name: str) -> None:
    others = {top(other) for other in imported(MODULES[name])} - {top(name), ""}
    assert not {other for other in others if RANK[other] >= RANK[top(name)]}


def test_nothing_within_a_package_imports_in_a_circle() -> None:
    inner = {
        name: {other for other in imported(path) if top(other) == top(name) and other != name}
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    TopologicalSorter(inner).prepare()  # CycleError names the modules


def test_nothing_needs_a_test_framework() -> None:
    roots = {name.partition(".")[0] for path in MODULES.values() for name in all_imported(path)}
    assert {"vllm", "kvobs", "unittest"} <= roots, "imports are found"
    assert not roots & {"pytest", "_pytest", "hypothesis", "tests"}


def test_imports_are_found() -> None:
    assert "state.ledger" in imported(MODULES["routing.scheduler"])
    assert sum(len(imported(path)) for path in MODULES.values()) > 200


def test_the_tables_and_the_pure_state_need_no_vllm() -> None:
    packages = [name for name in MODULES if top(name) in PURE]
    names = ["kvobs", *(f"kvobs.{name}" for name in (*NEEDS_NO_VLLM, *packages, *WITHOUT_TORCH))]
    hide = "import importlib, sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
    code = hide + f"[importlib.import_module(name) for name in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_state_knows_no_telemetry() -> None:
    code = "import sys; sys.modules['opentelemetry'] = sys.modules['prometheus_client'] = None; "
    names = [f"kvobs.{name}" for name in MODULES if top(name) == "state"]
    subprocess.run(
        [sys.executable, "-c", f"{code}import importlib; [importlib.import_module(name) for name in {names}]"],
        check=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short_enough_to_read(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= 400


def test_what_tests_share_is_no_test() -> None:
    """It is in ``tests/support``, or beside them."""
    names = [name for path in Path(__file__).parents[1].rglob("*.py") for name in all_imported(path)]
    assert "tests.support.rig" in names
    assert {name for name in names if name.rpartition(".")[2].startswith("test_")} == set()
