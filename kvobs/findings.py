"""Mistakes and warnings about a ``--kv-transfer-config``: where, what was found and is allowed, and what mends it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvobs.config import PATH, ConfigError, Configuration, Options, read

_SHOWN = ("kv_role", "kv_load_failure_policy")  # anything else may be, or hold, a secret


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong; ``path`` is a JSON path, or the options of the command line it is about."""

    path: str
    says: str
    fix: str


class TransferConfig(BaseModel):
    """The keys of vLLM's ``KVTransferConfig``, 0.27 to 0.33, for where there is no vLLM to ask."""

    model_config = ConfigDict(extra="forbid")

    kv_connector: str | None = None
    kv_connector_module_path: str | None = None
    engine_id: str | None = None
    kv_role: Literal["kv_producer", "kv_both", "kv_consumer"] | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    kv_buffer_device: str = ""
    kv_buffer_size: float = 1e9  # this one and the next three before 0.31 only
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = ""
    kv_port: int = 14579
    enable_permute_local_kv: bool = False
    kv_connector_extra_config: dict[str, Any] = {}


def parse(text: str) -> Mapping[str, Any]:
    """Return the configuration that JSON text holds.

    Raises:
        ValueError: when it is no JSON, or no object; says where.
    """
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError("the configuration is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"the configuration is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the configuration is a {type(config).__name__}, needs an object with the key 'kv_connector'")
    return config


def transfer_mistakes(entry: Mapping[str, Any], path: str, transfer_class: Callable[..., Any]) -> list[Finding]:
    """Return what vLLM's class of a transfer configuration, or the one above, refuses of an entry at a path."""
    found = []
    if entry.get("kv_connector") is not None and entry.get("kv_role") is None:
        fix = 'add "kv_role": "kv_both", or the role of this engine'
        roles = "'kv_producer', 'kv_both' or 'kv_consumer'"
        found.append(Finding(_join(path, "kv_role"), f"found {_shown(entry, 'kv_role')}, allowed: {roles}", fix))
        entry = {**entry, "kv_role": "kv_both"}
    try:
        transfer_class(**entry)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = str(detail["loc"][0]) if detail["loc"] else ""
            if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                found.append(_unknown(_join(path, key), key, _keys(transfer_class)))
            else:
                allowed = detail["msg"].replace("Input should be", "allowed:")
                fix = "write what is allowed" if detail["type"] == "literal_error" else "write that, or leave it out"
                found.append(Finding(_join(path, key), f"found {_shown(entry, key)}, {allowed}", fix))
    return found


def read_options(extra: Mapping[str, Any]) -> tuple[Configuration, list[Finding]]:
    """Return kvobs's options and the children's names, or what stands in for wrong ones, and what is wrong."""
    try:
        return read(extra), []
    except ConfigError as error:
        found = [_of_an_option(mistake) for mistake in error.mistakes]
    try:
        return read({"connectors": extra["connectors"]}), found
    except (ConfigError, KeyError):
        entries = extra.get("connectors")
        names = [
            str(entry.get("kv_connector", i)) if isinstance(entry, Mapping) else str(i)
            for i, entry in enumerate(entries if isinstance(entries, list | tuple) else ())
        ]
        return Configuration(options=Options(), names=tuple(names)), found


def of_isolation(isolate: Iterable[str], policy: object) -> list[Finding]:
    """Return what is wrong with best-effort children under a load failure policy."""
    if not tuple(isolate) or policy == "recompute":
        return []
    says = f"found {policy!r}, needs 'recompute', since {PATH}.kvobs.isolate names connectors whose loads may fail"
    return [Finding("kv_load_failure_policy", says, 'write "recompute" beside kv_connector at the top level')]


def ignored_policy(own: object, effective: object, path: str) -> list[Finding]:
    """Return a warning where a child has a load failure policy that vLLM does not look at."""
    if own is None or own == effective:
        return []
    says = f"found {own!r}, which has no effect: vLLM reads the top level only, where it is {effective!r}"
    return [Finding(f"{path}.kv_load_failure_policy", says, "set it beside kv_connector at the top level")]


def _of_an_option(mistake: str) -> Finding:
    """Add what mends it to a mistake of ``config``, which begins with its path."""
    path, says = re.split(r": (?=found |unknown option|\d+ mistakes)", mistake, maxsplit=1)
    if says.startswith("unknown option"):
        known = re.findall(r"'(\w+)'", says)
        return Finding(path, says, _did_you_mean(path.rpartition(".")[2], known, "leave it out"))
    if path.startswith(f"{PATH}.kvobs"):
        return Finding(path, says, "write what is allowed, or leave it out")
    return Finding(path, says, "write what it needs")


def _unknown(path: str, key: str, known: list[str]) -> Finding:
    fix = _did_you_mean(key, known, "leave it out; what is for the connector itself goes into its " + PATH)
    return Finding(path, f"unknown key, allowed: {', '.join(map(repr, known))}", fix)


def _did_you_mean(key: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(key, known, 1, cutoff=0.75)
    return f"write {close[0]!r}" if close else otherwise


def _keys(transfer_class: Any) -> list[str]:
    return list(getattr(transfer_class, "model_fields", None) or transfer_class.__dataclass_fields__)


def _shown(entry: Mapping[str, Any], key: str) -> str:
    if key not in entry:
        return "nothing"
    value = entry[key]
    return repr(value)[:80] if key in _SHOWN or value is None else f"a value of type {type(value).__name__}"


def _join(path: str, key: str) -> str:
    return ".".join(part for part in (path, key) if part)
