"""Imports go one way, in the order in which ``kvobs/__init__.py`` lists the stations."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import kvobs

PACKAGE = Path(kvobs.__file__).parent
ORDER = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  ", kvobs.__doc__ or "", re.MULTILINE)
STATIONS = [name for line in ORDER for name in line.split(", ")]
NEEDS_NO_VLLM = (
    "notices",
    "hooks",
    "signals",
    "faults",
    "context",
    "spans",
    "journal",
    "config",
    "layout",
    "topology",
    "runs",
    "reports",
    "transfers",
    "ledger",
    "tallies",
    "ring",
    "ring_files",
    "flight",
    "noticed",
    "recorder",
    "flush",
    "sampling",
    "call_spans",
    "request_spans",
    "traces",
    "tracing",
    "summary",
    "plugin",
    "readers",
    "recordings",
    "timeline",
    "rewrite",
    "findings",
    "check",
    "check_report",
    "check_command",
    "exports",
)


def station_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path: Path) -> set[str]:
    """Return the stations that a file imports, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "kvobs":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvobs."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("kvobs.")}
    return found & set(STATIONS)


def test_the_map_lists_every_file() -> None:
    stations = {station_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert stations == set(STATIONS)


def test_imports_go_one_way() -> None:
    rank = {name: i for i, name in enumerate(STATIONS)}
    for path in PACKAGE.rglob("*.py"):
        own = station_of(path)
        if own in rank:
            backwards = {name for name in imported(path) if rank[name] > rank[own]}
            assert not backwards, f"{path.name} imports {backwards}, which come after it"


def test_the_pure_stations_and_the_package_itself_need_no_vllm() -> None:
    names = ["kvobs", *(f"kvobs.{name}" for name in NEEDS_NO_VLLM)]
    hide = "import importlib, sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
    code = hide + f"[importlib.import_module(name) for name in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_files_are_short_enough_to_read() -> None:
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 330, path.name
