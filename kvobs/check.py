"""What a ``--kv-transfer-config`` will build, what is off and why, and every mistake in it, found in one go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvobs import plugin, sampling
from kvobs.config import PATH, Configuration, Options
from kvobs.findings import (
    Finding,
    TransferConfig,
    ignored_policy,
    of_isolation,
    read_options,
    transfer_mistakes,
)
from kvobs.rewrite import Router, rewrite, router_of
from kvobs.topology import Engine, who_reads

if TYPE_CHECKING:
    from kvobs.child_facts import Facts, NotUsableError

_SINGLE = f"{PATH}.connectors[0]"


@dataclass(frozen=True, slots=True)
class Flags:
    """What else vLLM is started with.

    ``is_mla`` says whether the model uses MLA, None where that was not told. ``engines`` are this one and the one on
    the other side.
    """

    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None
    api_server_count: int = 1
    is_mla: bool | None = None
    kv_heads: int = 1
    engines: tuple[Engine, Engine] | None = None


class Engines(NamedTuple):
    """Who reads from whom: two engines that fit, and their model."""

    prefill: Engine
    decode: Engine
    kv_heads: int
    is_mla: bool


@dataclass(frozen=True, slots=True)
class Child:
    """One child; ``facts`` is None where there is no vLLM, or its class can't be had."""

    name: str
    kv_connector: str
    kv_role: str | None
    is_isolated: bool
    facts: Facts | None


@dataclass(slots=True)
class Checked:
    """All that is to be said about a configuration. ``off`` says what is off, and why."""

    router: Router
    by_variable: bool = False
    vllm: str | None = None
    options: Options = field(default_factory=Options)
    failure_policy: str = "fail"
    tracing: str = "off"
    children: list[Child] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    engines: Engines | None = None
    mistakes: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def saying(self, fact: str, answer: bool) -> list[str]:
        """Return the children with this answer to a fact."""
        return [child.name for child in self.children if child.facts and getattr(child.facts, fact) is answer]

    def layouts(self, *, is_mla: bool) -> dict[str, str]:
        """Return the KV cache layout that each child needs, of those that need one for sure."""
        needs = {child.name: child.facts.layouts[is_mla] for child in self.children if child.facts}
        return {name: layout for name, layout in needs.items() if layout not in (None, "unknown")}


def check(config: Mapping[str, Any], flags: Flags = Flags()) -> Checked:
    """Check a parsed configuration; one without kvobs as ``rewrite`` would turn it into one."""
    router = router_of(config)
    by_variable = not config.get("kv_connector_module_path") and plugin.is_enabled(os.environ.get(plugin.VARIABLE, ""))
    if router is Router.STOCK and by_variable:
        router = Router.KVOBS
    checked = Checked(router, by_variable and router is Router.KVOBS)
    if router is not Router.KVOBS:
        checked.warnings.append(_takes_no_part(config, router))
    whole = rewrite(config)
    transfer_class: Callable[..., Any] = TransferConfig
    if find_spec("vllm") is not None:
        transfer_class, checked.vllm = _load_vllm()
    else:
        checked.off["classes"] = "vLLM is not installed here: what follows is what the text says"
    checked.mistakes += transfer_mistakes(whole, "", transfer_class)
    policy = whole.get("kv_load_failure_policy", checked.failure_policy)
    checked.failure_policy = policy if policy in ("fail", "recompute") else "fail"
    extra = whole.get(PATH, {})
    if isinstance(extra, Mapping):
        configuration, found = read_options(extra)
        checked.options = configuration.options
        checked.mistakes += found + of_isolation(configuration.options.isolate, policy)
        _check_children(checked, extra.get("connectors"), configuration, transfer_class)
    _check_layouts(checked, flags)
    _check_flags(checked, flags)
    _check_engines(checked, flags, is_producer=whole.get("kv_role") == "kv_producer")
    _say_what_is_off(checked, flags)
    if router_of(config) is Router.NONE:
        checked.mistakes = _at_the_top_level(checked.mistakes)
        checked.warnings = _at_the_top_level(checked.warnings)
    return checked


def _load_vllm() -> tuple[Callable[..., Any], str]:
    """Load vLLM as it loads itself: with its plugins, which may bring connectors."""
    from vllm import __version__
    from vllm.config import KVTransferConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return KVTransferConfig, str(__version__)


def _takes_no_part(config: Mapping[str, Any], router: Router) -> Finding:
    if router is Router.STOCK:
        extra = config.get(PATH)
        ignored = ", and its options are ignored" if isinstance(extra, Mapping) and "kvobs" in extra else ""
        says = f"found no 'kvobs': vLLM's own MultiConnector routes, kvobs takes no part{ignored}"
        return Finding("kv_connector_module_path", says, f"see --rewrite, or start vLLM with {plugin.VARIABLE}=1")
    says = "found one connector without MultiConnector: kvobs takes no part"
    return Finding("kv_connector", says, "see --rewrite")


def _check_children(
    checked: Checked, entries: Any, configuration: Configuration, transfer_class: Callable[..., Any]
) -> None:
    entries = entries if isinstance(entries, list | tuple) else ()
    isolated = configuration.options.isolate
    usable = [entry for entry in entries if isinstance(entry, Mapping)]
    for i, (name, entry) in enumerate(zip(configuration.names, entries, strict=False)):
        path = f"{PATH}.connectors[{i}]"
        connector = entry.get("kv_connector") if isinstance(entry, Mapping) else None
        if not isinstance(connector, str) or not connector:
            continue  # reported by whoever read the options
        found = transfer_mistakes(entry, path, transfer_class)
        facts = None
        if checked.vllm is not None:
            facts, unusable = _facts(i, name, entry, usable, is_valid=not found)
            found += [Finding(f"{path}.kv_connector", error.says, error.fix) for error in unusable]
        if facts is not None and facts.must_deliver and name in isolated:
            found.append(_must_deliver(name))
        checked.mistakes += found
        checked.warnings += ignored_policy(entry.get("kv_load_failure_policy"), checked.failure_policy, path)
        role = entry.get("kv_role")
        checked.children.append(Child(name, connector, str(role) if role else None, name in isolated, facts))


def _facts(
    index: int, name: str, entry: Mapping[str, Any], siblings: list[Mapping[str, Any]], *, is_valid: bool
) -> tuple[Facts | None, list[NotUsableError]]:
    """Return what a child's class says, where it is there and the rest of the entry is valid; or why not."""
    from vllm.config import KVTransferConfig

    from kvobs.child_facts import NotUsableError, class_of, facts_of
    from kvobs.children import ChildSpec

    try:
        cls = class_of(entry["kv_connector"], entry.get("kv_connector_module_path"))
        if not is_valid:
            return None, []
        return facts_of(ChildSpec(index, name, cls, KVTransferConfig(**entry)), siblings), []
    except NotUsableError as error:
        return None, [error]


def _must_deliver(name: str) -> Finding:
    return Finding(
        f"{PATH}.kvobs.isolate",
        f"found {name!r}, which must deliver what it saves (requires_kv_delivery), allowed: best-effort caches",
        "leave it out, or make it a kv_consumer",
    )


def _check_layouts(checked: Checked, flags: Flags) -> None:
    kinds = (False, True) if flags.is_mla is None else (flags.is_mla,)
    clashes = [needs for is_mla in kinds if len(set((needs := checked.layouts(is_mla=is_mla)).values())) > 1]
    if clashes:
        listed = ", ".join(f"{name} needs {layout}" for name, layout in clashes[0].items())
        models = "" if len(clashes) == len(kinds) else " with some models (say --model)"
        says = f"found connectors that need different layouts of the KV cache{models}: {listed}, allowed: one"
        findings = checked.mistakes if len(clashes) == len(kinds) else checked.warnings
        findings.append(Finding(f"{PATH}.connectors", says, "remove one, or configure them for the same layout"))


def _check_flags(checked: Checked, flags: Flags) -> None:
    if flags.disable_log_stats and flags.otlp_traces_endpoint is not None:
        says = "found both: vLLM itself fails at the first finished request with this pair"
        checked.mistakes.append(Finding("--disable-log-stats, --otlp-traces-endpoint", says, "leave one out"))
    elif flags.disable_log_stats:
        says = "found: kvobs routes, and nothing is seen of it, since no numbers reach the API server"
        checked.warnings.append(Finding("--disable-log-stats", says, "leave it out"))
    if flags.api_server_count > 1:
        says = f"found {flags.api_server_count}: Prometheus's multiprocess mode has no exemplars"
        checked.warnings.append(Finding("--api-server-count", says, "use 1 for exemplars; all else works"))


def _check_engines(checked: Checked, flags: Flags, *, is_producer: bool) -> None:
    """Find out whether the engines on both sides fit; this one decodes, unless it is a producer."""
    if flags.engines is None:
        return
    prefill, decode = flags.engines if is_producer else reversed(flags.engines)
    engines = Engines(prefill, decode, flags.kv_heads, bool(flags.is_mla))
    try:
        who_reads(*engines[:3], is_mla=engines.is_mla)
    except ValueError as error:
        where = "--tensor-parallel-size, --remote-tensor-parallel-size"
        checked.mistakes.append(Finding(where, str(error), "choose sizes that fit the model and each other"))
    else:
        checked.engines = engines


def _say_what_is_off(checked: Checked, flags: Flags) -> None:
    options, off = checked.options, checked.off
    if flags.disable_log_stats:
        off["metrics"] = off["tracing"] = "--disable-log-stats"
    else:
        _look_at_tracing(checked, flags)
    if flags.api_server_count > 1:
        off["exemplars"] = f"--api-server-count {flags.api_server_count}"
    elif "tracing" in off:
        off["exemplars"] = "nothing is traced"
    for what, fact in (("hybrid KV cache manager", "supports_hma"), ("sleep mode", "supports_sleep_mode")):
        if lacking := checked.saying(fact, False):
            off[what] = f"not supported by {', '.join(lacking)}"
    if not options.isolate:
        off["isolation"] = "kvobs.isolate names no child: one that fails ends the engine"
    if options.timeline.dir is None:
        off["timeline"] = "no kvobs.timeline.dir"
    if options.lookup_timeout_ms is None:
        off["lookup timeout"] = "no kvobs.lookup_timeout_ms: a child may say 'not yet' for ever"


def _look_at_tracing(checked: Checked, flags: Flags) -> None:
    """Find out how far tracing goes, in this environment."""
    level = checked.options.tracing.level
    shown = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=flags.otlp_traces_endpoint))
    tracing = sampling.Tracing.of(checked.options, shown)
    if tracing is not None:
        checked.tracing = "calls" if tracing.has_calls else "requests"
        if tracing.endpoint is None:
            checked.off["joining clients' traces"] = "no --otlp-traces-endpoint: vLLM drops their trace headers"
        return
    if level == "off":
        checked.off["tracing"] = "kvobs.tracing.level is 'off'"
        return
    is_disabled = os.environ.get(sampling.DISABLED, "").strip().lower() == "true"
    why = f"{sampling.DISABLED} is true here" if is_disabled else "no --otlp-traces-endpoint"
    checked.off["tracing"] = why
    if level is not None:
        says = f"found {level!r}, and nothing is traced: {why}"
        fix = f"unset {sampling.DISABLED}" if is_disabled else "start vLLM with --otlp-traces-endpoint"
        checked.warnings.append(Finding(f"{PATH}.kvobs.tracing.level", says, fix))


def _at_the_top_level(findings: Iterable[Finding]) -> list[Finding]:
    """Tell what was found of the one child where a single connector has it: at the top level; and once."""
    told = []
    for finding in findings:
        path = finding.path
        if path.startswith(_SINGLE):
            path = path.removeprefix(_SINGLE).removeprefix(".") or "kv_connector"
        told.append(Finding(path, finding.says, finding.fix))
    return list(dict.fromkeys(told))
