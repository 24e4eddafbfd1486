"""Keep what vLLM's classes said in the user's cache folder, as long as nothing that it depends on has changed.

An answer depends on the connector's entry, the versions of vLLM, its plugins, Python and kvobs, vLLM's variables, and
the source files: those of the class and its bases by their content, all others of their packages by size and time.
Only an answer of a class that can be used is kept, since a failed import may depend on anything. Any file may be
deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.cli.check import vllm_source
from kvobs.cli.check.facts import Answer, as_dict, from_dict
from kvobs.version import __version__

_MOST = 200  # answers that are kept


class Stamp(NamedTuple):
    """The state of a file: its time in ns and size; and its content, of which "" is not looked at."""

    mtime_ns: int
    size: int
    content: str = ""


def stamps(bases: tuple[tuple[str, str], ...]) -> dict[str, Stamp]:
    """Return the files that an answer about a class with these bases depends on; of this process's modules."""
    modules = {module for module, _ in bases} - sys.stdlib_module_names
    tops = {"kvobs", "vllm", *(module.partition(".")[0] for module in modules)}
    found: dict[str, Stamp] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and name.partition(".")[0] in tops:
            with suppress(OSError):
                found[path] = _stamp(path, has_content=name in modules)
    return found


def read(entry: Mapping[str, Any], *, has_hisparse: bool) -> Answer | None:
    """Return the kept answer about an entry, if it is still true."""
    try:
        kept = json.loads(_place(entry, has_hisparse=has_hisparse).read_text(encoding="utf-8"))
        for path, stamp in kept["files"].items():
            if _stamp(path, has_content=bool(stamp[2])) != tuple(stamp):
                return None
        return from_dict(kept["answer"]) if kept["files"] else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def keep(entry: Mapping[str, Any], answer: Answer, files: Mapping[str, Stamp], *, has_hisparse: bool) -> None:
    """Keep an answer about an entry; where that fails it is not kept."""
    if answer.facts is None or not files:
        return
    with suppress(OSError, ValueError):
        place = _place(entry, has_hisparse=has_hisparse)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_oldest(place.parent)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".new", delete=False) as new:
            json.dump({"answer": as_dict(answer), "files": files}, new)
        os.replace(new.name, place)


def folder() -> Path:
    """Return where answers are kept."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "kvobs" / "check"


def _place(entry: Mapping[str, Any], *, has_hisparse: bool) -> Path:
    plugins = sorted(
        (point.name, point.value, point.dist.version if point.dist else "")
        for point in entry_points(group="vllm.general_plugins")
    )
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("VLLM_"))
    known = [
        *(__version__, vllm_source.vllm_version(), str(vllm_source.folder()), sys.version, sys.prefix, sys.path),
        *(plugins, variables, entry, has_hisparse),
    ]
    text = json.dumps(known, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _stamp(path: str, *, has_content: bool) -> Stamp:
    state = os.stat(path)
    content = hashlib.sha256(Path(path).read_bytes()).hexdigest() if has_content else ""
    return Stamp(state.st_mtime_ns, state.st_size, content)


def _forget_oldest(place: Path) -> None:
    kept = sorted(place.glob("*"), key=lambda path: path.stat().st_mtime)
    for path in kept[: -_MOST + 1]:
        path.unlink(missing_ok=True)
