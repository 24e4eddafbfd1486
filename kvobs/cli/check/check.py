"""Check a ``--kv-transfer-config``: what it builds, what is off and why, and every mistake at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvobs import host as vllm_host
from kvobs import plugin
from kvobs.children.validation import (
    Host,
    NotUsableError,
    Validated,
    clashing_layouts,
    transfer_config,
    validate,
)
from kvobs.cli.check import port
from kvobs.cli.check.rewrite import Router, rewrite, router_of
from kvobs.config import PATH, Options
from kvobs.exporting import destinations
from kvobs.exporting.destinations import Setup
from kvobs.findings import Finding
from kvobs.host import TransferConfig
from kvobs.telemetry import sampling
from kvobs.telemetry.sampling import TracingSettings
from kvobs.topology import Engine, who_reads

if TYPE_CHECKING:
    from kvobs.cli.check.facts import Facts

_SINGLE = f"{PATH}.connectors[0]"


@dataclass(frozen=True, slots=True)
class Flags:
    """Further options of vLLM's start.

    ``is_mla``: whether the model uses MLA, None if unknown. ``engines``: this engine and the other one.
    """

    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None
    api_server_count: int = 1
    is_mla: bool | None = None
    kv_heads: int = 1
    engines: tuple[Engine, Engine] | None = None


class Engines(NamedTuple):
    """Two engines whose sizes fit, and their model."""

    prefill: Engine
    decode: Engine
    kv_heads: int
    is_mla: bool


@dataclass(frozen=True, slots=True)
class CheckedConnector:
    """One configured connector; ``facts`` is None without vLLM, or if its class can't be imported."""

    name: str
    kv_connector: str
    kv_role: str | None
    is_isolated: bool
    facts: Facts | None


@dataclass(slots=True)
class Checked:
    """The result of a check. ``off`` maps each disabled feature to the reason."""

    router: Router
    by_variable: bool = False
    vllm: str | None = None
    options: Options = field(default_factory=Options)
    failure_policy: str = "fail"
    tracing: str = "off"
    metrics_go_to: str = ""
    spans_go_to: str = ""
    children: list[CheckedConnector] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    engines: Engines | None = None
    mistakes: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def saying(self, fact: str, answer: bool) -> list[str]:
        """Return the children with this value of a fact."""
        return [child.name for child in self.children if child.facts and getattr(child.facts, fact) is answer]

    def layouts(self, *, is_mla: bool) -> dict[str, str]:
        """Return the KV cache layout of each child that is known to need one."""
        needs = {child.name: child.facts.layouts[is_mla] for child in self.children if child.facts}
        return {name: layout for name, layout in needs.items() if layout not in (None, "unknown")}


def check(config: Mapping[str, Any], flags: Flags = Flags()) -> Checked:
    """Check a parsed configuration; one without kvobs as ``rewrite`` would change it."""
    router = router_of(config)
    by_variable = not config.get("kv_connector_module_path") and plugin.is_enabled(os.environ.get(plugin.VARIABLE, ""))
    if router is Router.STOCK and by_variable:
        router = Router.KVOBS
    checked = Checked(router, by_variable and router is Router.KVOBS)
    if router is not Router.KVOBS:
        checked.warnings.append(_takes_no_part(config, router))
    whole = rewrite(config)
    host = Host(TransferConfig)
    if find_spec("vllm") is not None:
        host, checked.vllm = _load_vllm()
    else:
        checked.off["classes"] = "vLLM is not installed here: connector classes were not checked"
    checked.mistakes += transfer_config(whole, "", host.transfer_class)[1]
    policy = whole.get("kv_load_failure_policy", checked.failure_policy)
    checked.failure_policy = policy if policy in ("fail", "recompute") else "fail"
    extra = whole.get(PATH, {})
    if isinstance(extra, Mapping):
        validated = validate(extra, policy, host)
        checked.options = validated.configuration.options
        checked.mistakes += validated.mistakes
        checked.warnings += validated.warnings
        _add_children(checked, validated)
        checked.warnings += port.findings(checked.options.exporter, extra)
    tracing = _tracing(checked.options, flags)
    setup = _setup(checked.options, flags, tracing)
    _check_layouts(checked, flags)
    _check_flags(checked, flags, setup)
    _check_engines(checked, flags, is_producer=whole.get("kv_role") == "kv_producer")
    _say_what_is_off(checked, setup, tracing)
    if router_of(config) is Router.NONE:
        checked.mistakes = _at_the_top_level(checked.mistakes)
        checked.warnings = _at_the_top_level(checked.warnings)
    return checked


def _load_vllm() -> tuple[Host, str]:
    """Import vLLM with its plugins, which may register connectors."""
    from vllm import __version__
    from vllm.config import KVTransferConfig
    from vllm.plugins import load_general_plugins

    from kvobs.children.configured import class_of

    load_general_plugins()
    return Host(KVTransferConfig, class_of), str(__version__)


def _takes_no_part(config: Mapping[str, Any], router: Router) -> Finding:
    if router is Router.STOCK:
        extra = config.get(PATH)
        ignored = ", and kvobs's options are ignored" if isinstance(extra, Mapping) and "kvobs" in extra else ""
        says = f"kvobs is not enabled: vLLM's own MultiConnector routes{ignored}"
        fix = f"use the configuration that --rewrite prints, or start vLLM with {plugin.VARIABLE}=1"
        return Finding("kv_connector_module_path", says, fix=fix)
    return Finding("kv_connector", "kvobs is not enabled", fix="use the configuration that --rewrite prints")


def _add_children(checked: Checked, validated: Validated) -> None:
    """Add each configured connector, with the facts of its class if it is usable."""
    siblings = [entry for _, entry in validated.entries.values()]
    facts: dict[int, Facts] = {}
    for spec in validated.specs:
        from kvobs.cli.check.facts import facts_of

        try:
            facts[spec.index] = facts_of(spec, siblings)
        except NotUsableError as error:
            checked.mistakes.append(error.at(f"{PATH}.connectors[{spec.index}]"))
    isolated = validated.configuration.options.isolate
    for i, (name, entry) in validated.entries.items():
        role = entry.get("kv_role")
        child = CheckedConnector(
            name, entry["kv_connector"], str(role) if role else None, name in isolated, facts.get(i)
        )
        checked.children.append(child)


def _check_layouts(checked: Checked, flags: Flags) -> None:
    kinds = (False, True) if flags.is_mla is None else (flags.is_mla,)
    clashes = [finding for is_mla in kinds for finding in clashing_layouts(checked.layouts(is_mla=is_mla))]
    if len(clashes) == len(kinds):
        checked.mistakes.append(clashes[0])
    elif clashes:
        found = f"for some models (give --model to check one), {clashes[0].found}"
        checked.warnings.append(replace(clashes[0], found=found))


def _tracing(options: Options, flags: Flags) -> TracingSettings | None:
    """Return the tracing settings in this environment."""
    shown = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=flags.otlp_traces_endpoint))
    return TracingSettings.of(options, shown)


def _setup(options: Options, flags: Flags, tracing: TracingSettings | None) -> Setup:
    return Setup(
        options.exporter,
        has_stats=not flags.disable_log_stats,
        has_rust_frontend=vllm_host.has_rust_frontend(),
        api_servers=flags.api_server_count,
        has_traces=tracing is not None,
    )


def _check_flags(checked: Checked, flags: Flags, setup: Setup) -> None:
    if flags.disable_log_stats and flags.otlp_traces_endpoint is not None:
        says = "vLLM fails at the first finished request when both are given"
        checked.mistakes.append(Finding("--disable-log-stats, --otlp-traces-endpoint", says, fix="remove one of them"))
    else:
        checked.warnings += destinations.findings(setup)


def _check_engines(checked: Checked, flags: Flags, *, is_producer: bool) -> None:
    """Check that the two engines fit; this one decodes, unless it is a producer."""
    if flags.engines is None:
        return
    prefill, decode = flags.engines if is_producer else reversed(flags.engines)
    engines = Engines(prefill, decode, flags.kv_heads, bool(flags.is_mla))
    try:
        who_reads(*engines[:3], is_mla=engines.is_mla)
    except ValueError as error:
        where = "--tensor-parallel-size, --remote-tensor-parallel-size"
        checked.mistakes.append(Finding(where, str(error), fix="choose sizes that fit the model and each other"))
    else:
        checked.engines = engines


def _say_what_is_off(checked: Checked, setup: Setup, tracing: TracingSettings | None) -> None:
    options, off = checked.options, checked.off
    checked.metrics_go_to = destinations.metrics_go_to(setup)
    checked.spans_go_to = destinations.spans_go_to(setup, sampling.endpoint_of(tracing))
    off |= destinations.lost(setup)
    if "tracing" not in off:
        _look_at_tracing(checked, tracing)
    if "tracing" in off:
        off["exemplars"] = "tracing is off"
    for what, fact in (("hybrid KV cache manager", "supports_hma"), ("sleep mode", "supports_sleep_mode")):
        if lacking := checked.saying(fact, False):
            off[what] = f"not supported by {', '.join(lacking)}"
    if not options.isolate:
        off["isolation"] = "kvobs.isolate is empty: an exception in a connector ends the engine"
    if options.timeline.dir is None:
        off["timeline"] = "kvobs.timeline.dir is not set"
    if options.lookup_timeout_ms is None:
        off["lookup timeout"] = "kvobs.lookup_timeout_ms is not set: a connector may answer 'not yet' without limit"


def _look_at_tracing(checked: Checked, tracing: TracingSettings | None) -> None:
    """Note the tracing level, or why nothing is traced."""
    if tracing is not None:
        checked.tracing = "calls" if tracing.has_calls else "requests"
        if tracing.endpoint is None:
            checked.off["joining clients' traces"] = "--otlp-traces-endpoint is not set: vLLM drops trace headers"
        return
    checked.off["tracing"], warnings = sampling.why_off(checked.options)
    checked.warnings += warnings


def _at_the_top_level(findings: Iterable[Finding]) -> list[Finding]:
    """Move findings about a single connector's only child to the top level, without duplicates."""
    told = []
    for finding in findings:
        path = finding.path
        if path.startswith(_SINGLE):
            path = path.removeprefix(_SINGLE).removeprefix(".") or "kv_connector"
        told.append(replace(finding, path=path))
    return list(dict.fromkeys(told))
