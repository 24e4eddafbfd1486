"""Imports go one way: each module imports from lower tiers, and within its own package nothing in a circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from docs import house
from docs.house import TIERS, room

RANK = {name: rank for rank, names in enumerate(TIERS) for name in names}

PURE = ("state", "probe", "telemetry.requests", "telemetry.tracing")
NEEDS_NO_VLLM = ("log", "vllm_api", "schema", "topology", "faults", "page", "plugin")
WITHOUT_TORCH = (
    *("export.process", "export.span_export", "export.destinations", "export.starter", "export.__main__"),
    *("cli.scrapes", "cli.exporter", "cli.here", "cli.top.live", "cli.summary.command", "cli.trace.command"),
    *("connectors.specs", "connectors.validation", "routing.lookups", "cli.check.check"),
    *("testing.server", "testing.collector", "testing.model", "demo.run"),
)

MODULES = house.modules()


def imported(name: str) -> set[str]:
    return house.imported(MODULES[name], MODULES)


def all_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_module_has_a_tier() -> None:
    assert {room(name) for name in MODULES if name} == set(RANK)


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_a_module_imports_from_lower_tiers_only(name: str) -> None:
    others = {room(other) for other in imported(name)} - {room(name), ""}
    assert not {other for other in others if RANK[other] >= RANK[room(name)]}


def test_nothing_within_a_package_imports_in_a_circle() -> None:
    inner = {
        name: {other for other in imported(name) if room(other) == room(name) and other != name}
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    TopologicalSorter(inner).prepare()  # CycleError names the modules


def test_nothing_needs_a_test_framework() -> None:
    roots = {name.partition(".")[0] for path in MODULES.values() for name in all_imported(path)}
    assert {"vllm", "kvobs", "unittest"} <= roots, "imports are found"
    assert not roots & {"pytest", "_pytest", "hypothesis", "tests"}


def test_imports_are_found() -> None:
    assert "state.ledger" in imported("routing.scheduler")
    assert sum(len(imported(name)) for name in MODULES) > 200


def import_without(hidden: tuple[str, ...], modules: list[str]) -> None:
    hide = f"import importlib, sys; sys.modules.update(dict.fromkeys({hidden})); "
    code = f"{hide}[importlib.import_module(name) for name in {modules}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_tables_and_the_pure_state_need_no_vllm() -> None:
    within = [name for name in MODULES if name.startswith(tuple(f"{part}." for part in (*NEEDS_NO_VLLM, *PURE)))]
    names = ["kvobs", *(f"kvobs.{name}" for name in (*NEEDS_NO_VLLM, *within, *WITHOUT_TORCH))]
    import_without(("vllm", "torch"), names)


def test_the_state_knows_no_telemetry() -> None:
    names = [f"kvobs.{name}" for name in MODULES if room(name) == "state"]
    import_without(("opentelemetry", "prometheus_client"), names)


def test_shared_code_of_tests_is_in_no_test() -> None:
    """It is in ``tests/support``, or beside them."""
    names = [name for path in Path(__file__).parents[1].rglob("*.py") for name in all_imported(path)]
    assert "tests.support.rig" in names
    assert {name for name in names if name.rpartition(".")[2].startswith("test_")} == set()


def test_tests_of_a_module_are_found_from_its_name() -> None:
    unit = Path(__file__).parent
    paths = [path.relative_to(house.PACKAGE) for path in MODULES.values() if path.name != "__init__.py"]
    found = [path for path in paths if (unit / path).with_name(f"test_{path.name}").exists()]
    assert len(found) > 0.8 * len(paths)
