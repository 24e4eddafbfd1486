"""Read the installed vLLM's version and some of its names from its source, because importing vLLM is slow."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = re.compile(r"""\bregister_\w+\(\s*["'](\w+)["']""")
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=.*?[\"']([^\"']+)[\"']", re.MULTILINE)


@cache
def folder() -> Path | None:
    """Return the folder of the installed vLLM; None if there is none."""
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def vllm_version() -> str | None:
    """Return the version of the installed vLLM as it calls itself; None if there is none."""
    match = _VERSION.search(_text("_version.py"))
    return None if folder() is None else match[1] if match else "?"


def registered(path: str) -> frozenset[str]:
    """Return the names that a factory of vLLM registers; plugins may register more."""
    return frozenset(_REGISTERED.findall(_text(path)))


def transfer_keys() -> frozenset[str]:
    """Return the keys of this vLLM's ``KVTransferConfig``; empty if its source is not as expected."""
    return frozenset(_FIELD.findall(_text("config/kv_transfer.py").partition("class KVTransferConfig")[2]))


def _text(path: str) -> str:
    """Return one of vLLM's files; empty if it can't be read."""
    root = folder()
    try:
        return "" if root is None else (root / path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
