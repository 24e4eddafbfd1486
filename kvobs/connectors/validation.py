"""Validate the configured connectors: one validator for vLLM's start and for `kvobs check`, which may run without vLLM.

What a class does when it is built is not known here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from kvobs.connectors.known import cure, is_misspelt
from kvobs.connectors.specs import ConnectorSpec, is_kvobs, what_it_is, why_not_isolated
from kvobs.connectors.sync_loads import (
    SAFE,
    Conditions,
    async_only,
    loads_synchronously,
    unsafe_loads,
    unused_offers,
)
from kvobs.schema import config, kinds
from kvobs.schema.config import PATH, Configuration
from kvobs.schema.findings import Finding, cut, show
from kvobs.schema.options import Options, VerifyOptions
from kvobs.vllm_api.versions import RETIRED, TransferConfig

_SHOWN = ("kv_role", "kv_load_failure_policy")  # any other value may be a secret
_POLICY = "kv_load_failure_policy"
_DATA_PARALLEL_SUFFIX = re.compile(r"_dp\d+$")


class NotUsableError(ValueError):
    """A connector class can't be used; ``is_import``: because its module can't be imported."""

    def __init__(self, finding: Finding, *, is_import: bool = False) -> None:
        super().__init__(finding.found)
        self.finding, self.is_import = finding, is_import

    def at(self, path: str) -> Finding:
        """Return the error, given the path of the connector's entry."""
        return replace(self.finding, path=f"{path}.kv_connector")


def not_registered(name: str, registered: Sequence[str]) -> NotUsableError:
    """Return the error of a connector's name that this vLLM does not have."""
    reason, fix = cure(name, registered)
    kind = kinds.MISSPELT_CLASS if is_misspelt(name, registered) else kinds.CLASS
    reason = f": {reason}" if reason else ""
    return NotUsableError(kind.at("", ", ".join(registered), fix, name=show(name), reason=reason))


@dataclass(slots=True)
class Validated:
    """The result of a validation."""

    configuration: Configuration  # the options and names; the defaults if they are invalid
    policy: object = "fail"  # vLLM's kv_load_failure_policy
    entries: dict[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)  # with a class, by position: name
    transfers: dict[int, Any] = field(default_factory=dict)  # the valid transfer configurations of these, by position
    specs: list[ConnectorSpec] = field(
        default_factory=list
    )  # the connectors whose entry is valid and whose class is known
    mistakes: list[Finding] = field(default_factory=list)  # they stop startup
    warnings: list[Finding] = field(default_factory=list)  # settings without the intended effect
    absent: dict[str, Finding] = field(default_factory=dict)  # isolated connectors replaced by the stand-in: problem
    async_only: frozenset[int] = frozenset()  # the connectors whose synchronous loads are not used
    unsafe: dict[int, Finding] = field(default_factory=dict)  # those whose are not recomputed rightly: warning


def validate(
    extra: Mapping[str, Any], policy: object, transfer_class: Any, *, engine_id: str | None = None
) -> Validated:
    """Validate kvobs's options and the entry of every configured connector; ``find_classes`` continues.

    ``extra`` and ``policy`` are ``kv_connector_extra_config`` and ``kv_load_failure_policy`` of the top level;
    ``transfer_class`` is vLLM's ``KVTransferConfig``, or ``TransferConfig`` without vLLM.
    """
    configuration, mistakes = config.validate(extra)
    checked = Validated(configuration, policy, mistakes=mistakes)
    options, place = configuration.options, f"{PATH}.kvobs"
    if options.verify.recomputes and options.verify.sample_ratio is None:
        allowed = config.numbers(VerifyOptions, "sample_ratio")
        checked.mistakes.append(kinds.NO_SHARE.at(f"{place}.verify.sample_ratio", allowed))
    for needs_it, why in (
        (options.best_effort, f"loads of the connectors in {place}.best_effort may fail"),
        (options.verify.recomputes, f"{place}.verify.on_mismatch 'recompute' lets loads fail"),
    ):
        if needs_it and policy != "recompute":
            checked.mistakes.append(kinds.NEEDS_RECOMPUTE.at(_POLICY, "'recompute'", found=policy, why=why))
    effective = policy if policy == "recompute" else "fail"
    entries = extra.get("connectors")
    entries = entries if isinstance(entries, list | tuple) else ()
    for i, (name, entry) in enumerate(zip(configuration.names, entries, strict=False)):
        connector = entry.get("kv_connector") if isinstance(entry, Mapping) else None
        if isinstance(connector, str) and connector:  # any other is an error in the options
            checked.entries[i] = (name, entry)
            complete = {**entry, "engine_id": _engine_id(engine_id, entry.get("engine_id"))}
            transfer, mistakes = transfer_config(complete, path_of(i), transfer_class)
            if transfer is not None:
                checked.transfers[i] = transfer
            checked.mistakes += mistakes
            if (ignored := entry.get(_POLICY)) not in (None, effective):
                warning = kinds.POLICY_BELOW.at(f"{path_of(i)}.{_POLICY}", found=ignored, policy=effective)
                checked.warnings.append(warning)
    return checked


def find_classes(
    checked: Validated,
    class_of: Callable[[str, Any], type],
    stand_in: type | None = None,
    *,
    conditions: Conditions = SAFE,
) -> None:
    """Find each connector's class, and add the errors and warnings that follow from the classes.

    ``class_of`` returns the class of a name and module, or raises ``NotUsableError``. ``stand_in`` replaces an isolated
    connector that can't be imported; None: that is an error.
    """
    for index in checked.entries:
        _find_class(checked, index, class_of, stand_in)
    options = checked.configuration.options
    for spec in checked.specs:
        cls = spec.connector_class.__name__
        if spec.is_best_effort and (why := why_not_isolated(spec)):
            checked.mistakes.append(kinds.BEST_EFFORT.at(f"{PATH}.kvobs.best_effort", name=spec.name, cls=cls, why=why))
        if spec.name in options.min_tokens and (why := what_it_is(spec.connector_class)):
            checked.mistakes.append(kinds.MINIMUM.at(f"{PATH}.kvobs.min_tokens.{spec.name}", cls=cls, why=why))
    checked.async_only = async_only(checked.specs, conditions)
    checked.warnings += unused_offers(checked.specs, conditions, checked.async_only)
    checked.unsafe = unsafe_loads(checked.specs, conditions, checked.policy)
    for spec in checked.specs:  # of the others the router warns at the first synchronous load
        if spec.index in checked.unsafe and loads_synchronously(spec.connector_class):
            checked.warnings.append(checked.unsafe[spec.index])


def path_of(index: int) -> str:
    """Return the JSON path of the connector at this position."""
    return f"{PATH}.connectors[{index}]"


def _find_class(checked: Validated, index: int, class_of: Callable[[str, Any], type], stand_in: type | None) -> None:
    """Add the connector at this position, or the error in its class."""
    name, entry = checked.entries[index]
    path, is_best_effort = path_of(index), name in checked.configuration.options.best_effort
    try:
        connector_class = class_of(entry["kv_connector"], entry.get("kv_connector_module_path"))
    except NotUsableError as error:
        if not (is_best_effort and stand_in is not None and error.is_import):
            checked.mistakes.append(error.at(path))
            return
        checked.absent[name] = error.at(path)
        connector_class = stand_in
    if is_kvobs(connector_class):
        checked.mistakes.append(kinds.KVOBS_WITHIN.at(f"{path}.kv_connector"))
    elif index in checked.transfers:
        checked.specs.append(ConnectorSpec(index, name, connector_class, checked.transfers[index], is_best_effort))


def _engine_id(engines: str | None, connectors: Any) -> Any:
    """Return the connector's engine id with the engine's data-parallel suffix; the engine's if it has none."""
    if connectors is None:
        return engines
    suffix = _DATA_PARALLEL_SUFFIX.search(engines or "")
    return (
        connectors
        if suffix is None or not isinstance(connectors, str) or connectors.endswith(suffix[0])
        else connectors + suffix[0]
    )


def transfer_config(entry: Mapping[str, Any], path: str, transfer_class: Any) -> tuple[Any | None, list[Finding]]:
    """Return the transfer configuration of an entry at a path, and the errors in it; None if there are any."""
    found = []
    if entry.get("kv_connector") is not None and entry.get("kv_role") is None:
        roles = "'kv_producer', 'kv_both' or 'kv_consumer'"
        found.append(kinds.NO_ROLE.at(_join(path, "kv_role"), roles, found=_found(entry, "kv_role")))
        entry = {**entry, "kv_role": "kv_both"}
    try:
        transfer = transfer_class(**entry)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = cut(str(detail["loc"][0])) if detail["loc"] else ""
            where = _join(path, key)
            if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                keys = getattr(transfer_class, "model_fields", None) or transfer_class.__dataclass_fields__
                found.append(_unknown_key(where, key, [*keys]))
            else:
                problem, allowed = config.explain(detail["type"], detail["msg"])
                fix = "use an allowed value" if detail["type"] == "literal_error" else None
                found.append(kinds.VALUE.at(where, allowed, fix, found=_found(entry, key) + problem))
    return (None if found else transfer), found


def _unknown_key(where: str, key: str, keys: list[str]) -> Finding:
    """Return the error of an unknown key; one that belongs elsewhere is not taken for a misspelt one."""
    if key in ("connectors", "kvobs"):
        return kinds.WRONG_PLACE.at(where)
    if key in Options.model_fields:
        return kinds.OPTION_OUTSIDE.at(where)
    if key in RETIRED:
        return kinds.RETIRED_KEY.at(where)
    return kinds.UNKNOWN_KEY.near(where, key, keys, kinds.MISSPELT_KEY)


def misplaced(entry: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Yield a warning for each key within an entry's extra configuration that belongs elsewhere."""
    extra = entry.get(PATH)
    if not isinstance(extra, Mapping):
        return
    for key in extra:
        where = _join(path, f"{PATH}.{key}")
        if key.startswith("kv_") and key in TransferConfig.model_fields:
            yield kinds.MISPLACED.at(where)
        elif "connectors" in extra and key in Options.model_fields:
            yield kinds.OPTION_BESIDE.at(where)
        elif "connectors" in extra and key != "kvobs" and get_close_matches(key.lower(), ["kvobs"], cutoff=0.8):
            yield kinds.UNREAD_KEY.at(where)


def clashing_layouts(needs: Mapping[str, str | None]) -> list[Finding]:
    """Return the error of connectors that need different KV cache layouts, given each one's; None: any layout."""
    stated = {name: layout for name, layout in needs.items() if layout is not None}
    if len(set(stated.values())) <= 1:
        return []
    listed = ", ".join(f"{name} needs {layout}" for name, layout in stated.items())
    return [kinds.LAYOUTS.at(f"{PATH}.connectors", listed=listed)]


def _found(entry: Mapping[str, Any], key: str) -> str:
    if key not in entry:
        return "is missing"
    value = entry[key]
    shown = key in _SHOWN or value is None
    return f"found {cut(repr(value))}" if shown else f"found a value of type {type(value).__name__}"


def _join(path: str, key: str) -> str:
    return ".".join(part for part in (path, key) if part)
