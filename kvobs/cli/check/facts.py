"""What vLLM says of a configured connector's class, as plain data that another process has read, or read earlier.

This needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any, NamedTuple

from kvobs.children.known import LIBRARIES, is_installed
from kvobs.children.validation import NotUsableError


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a child's class with the child's configuration; None: known only after building.

    ``not_isolated`` is the reason if it can't be isolated. ``layouts`` are the KV cache layouts that it needs, for
    models without and with MLA.
    """

    class_path: str
    package: str | None
    empty_hooks: tuple[str, ...]
    busy_hooks: tuple[str, ...]
    supports_hma: bool
    supports_sleep_mode: bool | None
    requires_piecewise: bool
    layouts: tuple[str | None, str | None]
    has_handshake: bool
    must_deliver: bool | None
    not_isolated: str | None
    sync_only: bool
    library: str | None = None


class Refused(NamedTuple):
    """Why a class can't be used, as the parts of a finding."""

    found: str
    allowed: str
    fix: str

    @property
    def error(self) -> NotUsableError:
        """Return it as the error that it was."""
        return NotUsableError(self.found, self.allowed, fix=self.fix)


@dataclass(frozen=True, slots=True)
class Answer:
    """What vLLM says of one entry.

    Args:
        bases: module and name of the class and its bases, in Python's order; empty if there is no class.
        facts: properties of the class; None if its configuration is invalid, or it is refused.
        refused: why the class can't be used.
    """

    bases: tuple[tuple[str, str], ...] = ()
    facts: Facts | None = None
    refused: Refused | None = None

    @property
    def is_refused_whole(self) -> bool:
        """Return whether there is no class at all."""
        return self.refused is not None and not self.bases

    def stand_in(self) -> type:
        """Return a class with the names of the real one and its bases, and nothing else."""
        made: type = object
        for module, name in reversed(self.bases):
            if (module, name) != ("builtins", "object"):
                made = type(name, (made,), {"__module__": module})
        return made


def as_dict(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain data."""
    return asdict(answer)


def from_dict(data: Mapping[str, Any]) -> Answer:
    """Return the answer of plain data that may have been JSON; any error if it is not one."""
    facts = data["facts"]
    if facts is not None:
        facts = Facts(**{key: _tuple(value) for key, value in facts.items()})
    refused = Refused(*data["refused"]) if data["refused"] is not None else None
    return Answer(tuple((str(module), str(name)) for module, name in data["bases"]), facts, refused)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def library_of(entry: Mapping[str, Any]) -> str | None:
    """Return the libraries behind a connector of vLLM that are installed here, with their versions."""
    if entry.get("kv_connector_module_path") is not None:
        return None
    modules = [module for need in LIBRARIES.get(entry["kv_connector"], ()) for module in need.modules]
    return ", ".join(_with_version(module) for module in modules if is_installed(module)) or None


def _with_version(module: str) -> str:
    name = module.partition(".")[0]
    for distribution in (name, *packages_distributions().get(name, ())):
        with suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"
    return name


def has_hisparse(siblings: Iterable[Any]) -> bool:
    """Return whether one of the entries is HiSparse's, which changes the cache layout of others."""
    return any(isinstance(entry, Mapping) and entry.get("kv_connector") == "HiSparseConnector" for entry in siblings)
