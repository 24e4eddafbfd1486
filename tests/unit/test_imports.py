"""What can be imported without vLLM, and where tests are; `make lint` checks which package imports which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.pages import ROOT

PURE = ("state", "probe", "telemetry.estimates", "telemetry.requests", "telemetry.tracing")
NEEDS_NO_VLLM = ("log", "vllm_api", "schema", "topology", "faults", "page", "plugin")
WITHOUT_TORCH = (
    *("export.process", "export.span_export", "export.destinations", "export.starter", "export.__main__"),
    *("cli.scrapes", "cli.exporter", "cli.here", "cli.top.live", "cli.summary.command", "cli.trace.command"),
    *("connectors.specs", "connectors.validation", "routing.lookups", "cli.check.check"),
    *("testing.server", "testing.collector", "testing.model", "demo.run"),
)

PACKAGE = ROOT / "kvobs"
PATHS = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def all_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_tables_and_the_pure_state_need_no_vllm() -> None:
    """Nor do the libraries that they import; ``plugin`` and ``vllm_api`` import vLLM late."""
    parts = (*NEEDS_NO_VLLM, *PURE)
    names = [".".join(path.with_suffix("").parts) for path in PATHS]
    within = [name for name in names if name.startswith(tuple(f"{part}." for part in parts))]
    assert len(within) > 40
    code = f"""import importlib, sys
sys.modules.update(dict.fromkeys(["vllm", "torch"]))
for name in {["kvobs", *(f"kvobs.{name}" for name in (*parts, *within, *WITHOUT_TORCH))]}:
    importlib.import_module(name)"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_shared_code_of_tests_is_in_no_test() -> None:
    """It is in ``tests/support``, or next to them."""
    names = [name for path in Path(__file__).parents[1].rglob("*.py") for name in all_imported(path)]
    assert "tests.support.rig" in names
    assert {name for name in names if name.rpartition(".")[2].startswith("test_")} == set()


def test_tests_of_a_module_are_found_from_its_name() -> None:
    unit = Path(__file__).parent
    found = [path for path in PATHS if (unit / path).with_name(f"test_{path.name}").exists()]
    assert len(found) > 0.8 * len(PATHS)
