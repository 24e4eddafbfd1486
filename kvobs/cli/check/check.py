"""Check a ``--kv-transfer-config``: first its text, then the classes of its connectors, which imports vLLM."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvobs.children import validation
from kvobs.cli.check import rules, vllm_source
from kvobs.cli.check.source import Router, rewrite, router_of
from kvobs.cli.topology import Pair
from kvobs.export import destinations
from kvobs.export.destinations import Setup
from kvobs.export.http_server import holder, resolve
from kvobs.log import line
from kvobs.schema.config import ENABLE_VARIABLE, EXPORTER_VARIABLE, PATH, is_enabled
from kvobs.schema.findings import Finding, show
from kvobs.schema.options import ExporterOptions, Options
from kvobs.telemetry.requests import sampling
from kvobs.telemetry.requests.sampling import TracingSettings
from kvobs.topology import Engine
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from kvobs.cli.check.classes import Facts

_ENDPOINT = re.compile(r"[a-z][a-z0-9+.-]*:/{0,3}[^/\s]+.*|[^/\s]+:\d+/?", re.IGNORECASE)
_HISPARSE = "HiSparseConnector"


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


@dataclass(slots=True)
class CheckedConnector:
    """One configured connector; ``facts`` is None without vLLM, or if its class can't be used."""

    name: str
    kv_connector: str
    kv_role: str | None
    is_isolated: bool
    facts: Facts | None = None


@dataclass(slots=True)
class Checked:
    """The result of a check. ``config`` has kvobs as its router; ``off`` maps each disabled feature to the reason."""

    router: Router
    by_variable: bool = False
    vllm: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may have secrets
    validated: validation.Validated | None = field(default=None, repr=False)
    options: Options = field(default_factory=Options)
    failure_policy: str = "fail"
    tracing: str = "off"
    metrics_go_to: str = ""
    spans_go_to: str = ""
    connectors: list[CheckedConnector] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    engines: Pair | None = None
    mistakes: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def add(self, mistakes: Iterable[Finding] = (), warnings: Iterable[Finding] = ()) -> None:
        """Add findings, each once: a missing library is reported, not the import error that it causes."""
        refused = {finding.path for finding in self.mistakes if finding.path.endswith("kv_connector")}
        self.mistakes += [finding for finding in self._located(mistakes) if finding.path not in refused]
        self.warnings += self._located(warnings)
        self.mistakes, self.warnings = list(dict.fromkeys(self.mistakes)), list(dict.fromkeys(self.warnings))

    def _located(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Yield findings with their paths in the configuration as it is: a single connector is its top level."""
        for finding in findings:
            if self.router is Router.NONE and finding.path.startswith(validation.path_of(0)):
                inner = finding.path.removeprefix(validation.path_of(0)).removeprefix(".")
                yield replace(finding, path=inner or "kv_connector")
            else:
                yield finding

    def with_fact(self, fact: str, value: bool) -> list[str]:
        """Return the names of the connectors with this value of a fact."""
        return [each.name for each in self.connectors if each.facts and getattr(each.facts, fact) is value]

    def layouts(self, *, is_mla: bool) -> dict[str, str]:
        """Return the KV cache layout of each connector that is known to need one."""
        needs = {each.name: each.facts.layouts[is_mla] for each in self.connectors if each.facts}
        return {name: layout for name, layout in needs.items() if layout not in (None, "unknown")}


def check(config: Mapping[str, Any], flags: Flags = Flags()) -> Checked:
    """Check a parsed configuration, with the classes of its connectors if vLLM is installed."""
    checked = check_text(config, flags)
    check_classes(checked, is_mla=flags.is_mla)
    return checked


# The text


def check_text(config: Mapping[str, Any], flags: Flags = Flags(), *, is_rewritten: bool = False) -> Checked:
    """Check the text of a configuration; one without kvobs as ``rewrite`` would change it.

    Args:
        config: the parsed configuration.
        flags: further options of vLLM's start.
        is_rewritten: whether the result of ``rewrite`` is what will be used, perhaps in another environment.
    """
    router = router_of(config)
    by_variable = router is Router.STOCK and not config.get("kv_connector_module_path") and is_enabled()
    if by_variable or (is_rewritten and router is Router.STOCK):
        router = Router.KVOBS
    checked = Checked(router, by_variable, vllm_source.vllm_version(), rewrite(config))
    if router is not Router.KVOBS and not is_rewritten:
        checked.add(warnings=[_not_enabled(config, router)])
    _check_entries(checked)
    has_vllm = not is_rewritten and checked.vllm is not None
    checked.add(*rules.findings(checked.config, is_stock=router is Router.STOCK, has_vllm=has_vllm))
    if checked.vllm is None:
        checked.off["classes"] = "vLLM is not installed here: connector classes were not checked"
    _check_telemetry(checked, flags)
    _check_engines(checked, flags)
    _note_options_that_are_off(checked)
    return checked


def _not_enabled(config: Mapping[str, Any], router: Router) -> Finding:
    if router is Router.NONE:
        return Finding("kv_connector", "kvobs is not enabled", fix="use the configuration that --rewrite prints")
    extra = config.get(PATH)
    ignored = ", and kvobs's options are ignored" if isinstance(extra, Mapping) and "kvobs" in extra else ""
    found = f"kvobs is not enabled: vLLM's own MultiConnector routes{ignored}"
    fix = f"use the configuration that --rewrite prints, or start vLLM with {ENABLE_VARIABLE}=1"
    return Finding("kv_connector_module_path", found, fix=fix)


def _check_entries(checked: Checked) -> None:
    """Check the top level, kvobs's options, and each connector's entry."""
    keys = vllm_source.transfer_keys()  # those of the installed vLLM, if there is one
    transfer_class = versions.transfer_config_with(keys) if keys else versions.TransferConfig
    checked.add(validation.transfer_config(checked.config, "", transfer_class)[1])
    policy = checked.config.get("kv_load_failure_policy", "fail")
    checked.failure_policy = policy if policy in ("fail", "recompute") else "fail"
    extra = checked.config.get(PATH, {})
    if not isinstance(extra, Mapping):
        return
    checked.validated = validated = validation.validate(extra, policy, transfer_class)
    checked.options = validated.configuration.options
    checked.add(validated.mistakes, validated.warnings)
    for name, entry in validated.entries.values():
        role = entry.get("kv_role")
        is_isolated = name in checked.options.isolate
        connector = CheckedConnector(name, entry["kv_connector"], str(role) if role else None, is_isolated)
        checked.connectors.append(connector)


def _check_port(checked: Checked, exporter: ExporterOptions | None) -> None:
    """Warn if the exporter that will run could not listen here now; its engine may be running, or be for elsewhere."""
    if exporter is None or exporter.port is None:
        return
    try:
        _listen(exporter.host, exporter.port)
    except (OSError, ValueError) as error:  # ValueError: not a host name
        extra = checked.config.get(PATH)
        options = extra.get("kvobs") if isinstance(extra, Mapping) else None
        is_option = isinstance(options, Mapping) and "exporter" in options
        by_variable = not is_option and os.environ.get(EXPORTER_VARIABLE)
        path = f"environment variable {EXPORTER_VARIABLE}" if by_variable else f"{PATH}.kvobs.exporter"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            found = f"found port {exporter.port}, which is in use on this machine: held by {holder(exporter.port)}"
            fix = "end that process, unless it is the exporter of this engine, which runs already; or use another port"
        else:
            reason = getattr(error, "strerror", None) or "not a host name"
            found = f"found {show(exporter.host)} and port {exporter.port}, where this machine can't listen: {reason}"
            fix = "use an address of the engine's machine, and a port that its user may open"
        checked.add(warnings=[Finding(path, found, fix=fix)])


def _listen(host: str, port: int) -> None:
    """Listen for a moment, as the exporter would; OSError if that fails."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server that ended don't count
        probe.bind((address, port))
        probe.listen()


def _check_telemetry(checked: Checked, flags: Flags) -> None:
    """Find where metrics and spans go, which of them are lost, and why."""
    endpoint, options = flags.otlp_traces_endpoint, checked.options
    # The part of vLLM's configuration that is read.
    vllm_config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
    tracing = TracingSettings.of(options, vllm_config)
    setup = Setup(
        options.exporter,
        has_stats=not flags.disable_log_stats,
        has_rust_frontend=versions.has_rust_frontend(),
        api_servers=flags.api_server_count,
        has_multiprocess_metrics=versions.has_multiprocess_metrics(),
        has_traces=tracing is not None,
    )
    _check_port(checked, setup.running)
    if flags.disable_log_stats and endpoint is not None:
        found = "vLLM fails at the first finished request when both are given"
        checked.add([Finding("--disable-log-stats, --otlp-traces-endpoint", found, fix="remove one of them")])
    else:
        checked.add(warnings=destinations.findings(setup))
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        fix = "write the collector's address, such as http://localhost:4317"
        checked.add(warnings=[Finding("--otlp-traces-endpoint", "has neither a scheme nor a port", fix=fix)])
    checked.metrics_go_to = destinations.metrics_go_to(setup)
    checked.spans_go_to = destinations.spans_go_to(setup, sampling.endpoint_of(tracing))
    checked.off |= destinations.lost(setup)
    if "tracing" not in checked.off:
        _check_tracing(checked, tracing)
    if "tracing" in checked.off:
        checked.off["exemplars"] = "tracing is off"


def _check_tracing(checked: Checked, tracing: TracingSettings | None) -> None:
    """Note the tracing level, or why nothing is traced."""
    if tracing is None:
        checked.off["tracing"], warnings = sampling.why_off(checked.options)
        checked.add(warnings=warnings)
        return
    checked.tracing = "calls" if tracing.has_calls else "requests"
    if tracing.endpoint is None:
        checked.off["joining clients' traces"] = "--otlp-traces-endpoint is not set: vLLM drops trace headers"


def _check_engines(checked: Checked, flags: Flags) -> None:
    """Check that the two engines fit; this one decodes, unless it is a producer."""
    if flags.engines is None:
        return
    is_producer = checked.config.get("kv_role") == "kv_producer"
    prefill, decode = flags.engines if is_producer else reversed(flags.engines)
    pair = Pair(prefill, decode, flags.kv_heads, bool(flags.is_mla))
    try:
        pair.reads()
    except ValueError as error:
        where = "--tensor-parallel-size, --remote-tensor-parallel-size"
        checked.add([Finding(where, str(error), fix="choose sizes that fit the model and each other")])
    else:
        checked.engines = pair


def _note_options_that_are_off(checked: Checked) -> None:
    options, off = checked.options, checked.off
    if not options.isolate:
        off["isolation"] = "kvobs.isolate is empty: an exception in a connector ends the engine"
    if options.timeline.dir is None:
        off["timeline"] = "kvobs.timeline.dir is not set"
    if not options.report and options.request_log is None:
        off["request reports"] = "neither kvobs.report nor kvobs.request_log is set"
    if options.lookup_timeout_ms is None:
        off["lookup timeout"] = "kvobs.lookup_timeout_ms is not set: a connector may answer 'not yet' without limit"


# The classes


def check_classes(checked: Checked, *, is_mla: bool | None = None) -> None:
    """Add the properties and mistakes of the connectors' classes to a checked text; nothing without vLLM."""
    validated = checked.validated
    if checked.vllm is None or validated is None or not validated.entries:
        return
    try:
        from kvobs.cli.check import classes

        classes.load_general_plugins()
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {line(error, 300)}"
        checked.off["classes"] = f"vLLM can't be imported here: {reason}"
        found = f"can't be imported here, so that connector classes were not checked: {reason}"
        fix = "run `python -c 'import vllm'` here, and correct what it names"
        checked.add(warnings=[Finding("vLLM", found, fix=fix)])
        return
    validation.find_classes(validated, classes.class_of)
    checked.add(validated.mistakes, validated.warnings)
    connectors = dict(zip(validated.entries, checked.connectors, strict=True))
    has_hisparse = any(connector.kv_connector == _HISPARSE for connector in checked.connectors)
    for spec in validated.specs:
        entry = validated.entries[spec.index][1]
        transfer, mistakes = validation.transfer_config(entry, validation.path_of(spec.index), classes.KVTransferConfig)
        checked.add(mistakes)
        if transfer is not None:
            try:
                facts = classes.facts_of(spec.connector_class, transfer, has_hisparse=has_hisparse)
            except validation.NotUsableError as error:
                checked.add([error.at(validation.path_of(spec.index))])
            else:
                connectors[spec.index].facts = facts
    _check_layouts(checked, is_mla)
    for feature, fact in (("hybrid KV cache manager", "supports_hma"), ("sleep mode", "supports_sleep_mode")):
        if lacking := checked.with_fact(fact, False):
            checked.off[feature] = f"not supported by {', '.join(lacking)}"


def _check_layouts(checked: Checked, is_mla: bool | None) -> None:
    """Check that the connectors need one layout; if the model is unknown, for models with and without MLA."""
    kinds = (False, True) if is_mla is None else (is_mla,)
    clashes = [finding for kind in kinds for finding in validation.clashing_layouts(checked.layouts(is_mla=kind))]
    if len(clashes) == len(kinds):
        checked.add(clashes[:1])
    elif clashes:
        found = f"for some models (give --model to check one), {clashes[0].found}"
        checked.add(warnings=[replace(clashes[0], found=found)])
