"""Find what is new in the newest vLLM on the package index, from its source: it need not run here."""

import ast
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from kvobs.vllm_api.hooks import HOOKS, INHERITED
from kvobs.vllm_api.versions import AGGREGATOR_MEMBERS, OUTPUT_FIELDS, RESULT_FIELDS

from . import hosts

_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector"
KNOWN: Mapping[tuple[str, str], Collection[str]] = {
    (f"{_CONNECTOR}/v1/base.py", "KVConnectorBase_V1"): {*HOOKS, *INHERITED},
    (f"{_CONNECTOR}/v1/base.py", "SupportsHMA"): {*HOOKS, *INHERITED},
    (f"{_CONNECTOR}/v1/base.py", "KVConnectorTransferResults"): RESULT_FIELDS,
    (f"{_CONNECTOR}/utils.py", "KVOutputAggregator"): AGGREGATOR_MEMBERS,
    ("vllm/v1/outputs.py", "KVConnectorOutput"): {*OUTPUT_FIELDS, "is_empty", "merge"},
}
"""File and class -> its public members that kvobs knows."""


def newest() -> str:
    """Return the newest release that this environment's index has."""
    command = [*hosts._pip(), "index", "versions", "vllm"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.match(r"vllm \((.+)\)", found)
    assert match is not None, found
    return match[1]


def new_in(folder: Path) -> list[str]:
    """Return the members of the classes in a version's folder that kvobs does not know, and the classes that moved."""
    new = []
    for (file, name), known in KNOWN.items():
        members = _members(folder / file, name)
        new += [f"{name}.{each}" for each in members if each not in known and not each.startswith("_")]
        new += [] if members else [f"{name} is not in {file}"]
    return new


def _members(file: Path, name: str) -> list[str]:
    module = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    bodies = [found.body for found in module.body if isinstance(found, ast.ClassDef) and found.name == name]
    return [member for body in bodies for node in body for member in _names(node)]


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
