"""Check a ``--kv-transfer-config``: what it builds, what is off and why, and every mistake at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvobs import host as vllm_host
from kvobs import plugin
from kvobs.children.validation import (
    Host,
    Validated,
    clashing_layouts,
    transfer_config,
    validate,
)
from kvobs.cli.check import entries, port, vllm_source
from kvobs.cli.check.asker import Ask, ask_here, questions_of
from kvobs.cli.check.asking import NoAnswerError
from kvobs.cli.check.facts import Answer, Facts, library_of
from kvobs.cli.check.rewrite import Router, rewrite, router_of
from kvobs.config import PATH
from kvobs.exporting import destinations
from kvobs.exporting.destinations import Setup
from kvobs.findings import Finding
from kvobs.options import Options
from kvobs.telemetry import sampling
from kvobs.telemetry.sampling import TracingSettings
from kvobs.topology import Engine, who_reads

_ENDPOINT = re.compile(r"[a-z][a-z0-9+.-]*:/{0,3}[^/\s]+.*|[^/\s]+:\d+/?", re.IGNORECASE)
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

    @property
    def has_classes(self) -> bool:
        """Return whether vLLM's classes were asked."""
        return "classes" not in self.off

    def saying(self, fact: str, answer: bool) -> list[str]:
        """Return the children with this value of a fact."""
        return [child.name for child in self.children if child.facts and getattr(child.facts, fact) is answer]

    def layouts(self, *, is_mla: bool) -> dict[str, str]:
        """Return the KV cache layout of each child that is known to need one."""
        needs = {child.name: child.facts.layouts[is_mla] for child in self.children if child.facts}
        return {name: layout for name, layout in needs.items() if layout not in (None, "unknown")}


def check(
    config: Mapping[str, Any], flags: Flags = Flags(), ask: Ask | None = ask_here, *, is_for_here: bool = True
) -> Checked:
    """Check a parsed configuration; one without kvobs as ``rewrite`` would change it.

    Args:
        config: the configuration.
        flags: further options of vLLM's start.
        ask: what asks vLLM's classes; None: the text alone is checked.
        is_for_here: whether the engine is to run in this environment, so that libraries must be in it.
    """
    router = router_of(config)
    by_variable = not config.get("kv_connector_module_path") and plugin.is_enabled(os.environ.get(plugin.VARIABLE, ""))
    if router is Router.STOCK and by_variable:
        router = Router.KVOBS
    checked = Checked(router, by_variable and router is Router.KVOBS, vllm_source.vllm_version())
    if router is not Router.KVOBS:
        checked.warnings.append(_takes_no_part(config, router))
    whole = rewrite(config)
    answers = _answers(checked, whole, ask)
    host = Host(transfer_class(), _class_of(whole, answers) if answers is not None else None)
    checked.mistakes += transfer_config(whole, "", host.transfer_class)[1]
    policy = whole.get("kv_load_failure_policy", checked.failure_policy)
    checked.failure_policy = policy if policy in ("fail", "recompute") else "fail"
    refused, ignored = entries.findings(whole, router, has_vllm=is_for_here and checked.vllm is not None)
    extra = whole.get(PATH, {})
    if isinstance(extra, Mapping):
        validated = validate(extra, policy, host)
        checked.options = validated.configuration.options
        checked.mistakes += validated.mistakes
        checked.warnings += validated.warnings
        _add_children(checked, validated, answers or {})
        checked.warnings += port.findings(checked.options.exporter, extra)
    # Of a missing library and the failed import that it causes, the first has the better cure.
    places = {finding.path for finding in refused if finding.path.endswith("kv_connector")}
    checked.mistakes = [finding for finding in checked.mistakes if finding.path not in places] + refused
    checked.warnings += ignored
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


def _answers(checked: Checked, whole: Mapping[str, Any], ask: Ask | None) -> dict[int, Answer] | None:
    """Return vLLM's answers by the position of the entry; None, and why, if it was not asked."""
    if checked.vllm is None:
        checked.off["classes"] = "vLLM is not installed here: connector classes were not checked"
    elif ask is None:
        checked.off["classes"] = "not asked yet"
    else:
        asked = questions_of(whole)
        try:
            return dict(zip((i for i, _ in asked), ask([question for _, question in asked]), strict=True))
        except NoAnswerError as error:
            checked.off["classes"] = f"vLLM can't be imported here: {error}"
            found = f"can't be imported here, so that connector classes were not checked: {error}"
            checked.warnings.append(Finding("vLLM", found, fix="start vLLM here once, and mend what it says"))
    return None


def transfer_class() -> type[Any]:
    """Return the class of transfer configurations, with the keys of the installed vLLM if there is one."""
    keys = vllm_source.transfer_keys()
    return vllm_host.transfer_config_with(keys) if keys else vllm_host.TransferConfig


def _class_of(whole: Mapping[str, Any], answers: Mapping[int, Answer]) -> Callable[[str, Any], type]:
    """Return the function that finds an entry's class: a stand-in of the same names, from vLLM's answers."""
    found = {_class_key(entry): answers[i] for i, (entry, _) in questions_of(whole) if i in answers}

    def class_of(name: str, module: Any) -> type:
        answer = found[_class_key({"kv_connector": name, "kv_connector_module_path": module})]
        if not answer.bases and answer.refused is not None:
            raise answer.refused.error
        return answer.stand_in()

    return class_of


def _class_key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["kv_connector"], repr(entry.get("kv_connector_module_path"))


def _takes_no_part(config: Mapping[str, Any], router: Router) -> Finding:
    if router is Router.STOCK:
        extra = config.get(PATH)
        ignored = ", and kvobs's options are ignored" if isinstance(extra, Mapping) and "kvobs" in extra else ""
        says = f"kvobs is not enabled: vLLM's own MultiConnector routes{ignored}"
        fix = f"use the configuration that --rewrite prints, or start vLLM with {plugin.VARIABLE}=1"
        return Finding("kv_connector_module_path", says, fix=fix)
    return Finding("kv_connector", "kvobs is not enabled", fix="use the configuration that --rewrite prints")


def _add_children(checked: Checked, validated: Validated, answers: Mapping[int, Answer]) -> None:
    """Add each configured connector, with the facts of its class if it is usable."""
    usable = {spec.index for spec in validated.specs}
    isolated = validated.configuration.options.isolate
    for i, (name, entry) in validated.entries.items():
        answer = answers.get(i, Answer()) if i in usable else Answer()
        if answer.refused is not None:
            checked.mistakes.append(answer.refused.error.at(f"{PATH}.connectors[{i}]"))
        facts = replace(answer.facts, library=library_of(entry)) if answer.facts is not None else None
        role = entry.get("kv_role")
        child = CheckedConnector(name, entry["kv_connector"], str(role) if role else None, name in isolated, facts)
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
    endpoint = flags.otlp_traces_endpoint
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        fix = "write the collector's address, such as http://localhost:4317"
        checked.warnings.append(Finding("--otlp-traces-endpoint", "is no address with a scheme or port", fix=fix))


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
    if not options.report and options.request_log is None:
        off["request reports"] = "neither kvobs.report nor kvobs.request_log is set"
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
    moved = []
    for finding in findings:
        path = finding.path
        if path.startswith(_SINGLE):
            path = path.removeprefix(_SINGLE).removeprefix(".") or "kv_connector"
        moved.append(replace(finding, path=path))
    return list(dict.fromkeys(moved))
