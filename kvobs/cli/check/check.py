"""Check a ``--kv-transfer-config``: first its text, then the classes of its connectors, which imports vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvobs.cli.check import peers, rules, vllm_source
from kvobs.cli.check.flags import ALONE, CONTAINER, DEFAULTS, DYNAMO_VLLM, IMAGE, NIXL_PORT, RAY, Flags
from kvobs.cli.check.launch import NETWORK
from kvobs.cli.check.result import CheckResult, ConnectorResult
from kvobs.cli.check.rewrite import Router, correct, rewrite, router_of, without_key
from kvobs.connectors import validation
from kvobs.connectors.known import PD_ROUTER, ROUTER
from kvobs.export import destinations, listening
from kvobs.export.destinations import Hidden, exporter_of
from kvobs.export.listening import is_reached_from_elsewhere
from kvobs.schema import kinds
from kvobs.schema.config import ENABLE_VARIABLE, EXPORTER_VARIABLE, PATH, is_enabled
from kvobs.schema.findings import Finding, show
from kvobs.schema.options import ExporterOptions
from kvobs.telemetry.tracing import sampling
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.vllm_api import versions

_ENDPOINT = re.compile(r"[a-z][a-z0-9+.-]*:/{0,3}[^/\s]+.*|[^/\s]+:\d+/?", re.IGNORECASE)
_PLUGINS = "VLLM_PLUGINS"
_CONSOLIDATOR = "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR"
_OF_DYNAMO = re.compile(r"DYN_(?!KVBM_)")  # KVBM's are read under `vllm serve` too
_HOUR_S, _FEW_MS = 3600, 10


def check_text(
    config: Mapping[str, Any], flags: Flags = DEFAULTS, *, is_rewritten: bool = False, holes: tuple[str, ...] = ()
) -> CheckResult:
    """Check the text of a configuration; one without kvobs as ``rewrite`` would change it.

    With ``is_rewritten`` the result of ``rewrite`` is what will be used, perhaps in another environment. ``holes`` are
    the places of values that are not known.
    """
    config, slips = correct(without_key(config) if is_rewritten else config)
    router = router_of(config)
    is_plain = router is Router.STOCK and not config.get("kv_connector_module_path")
    is_single = router is Router.NONE
    is_wrapped = is_single and config.get("kv_connector") not in (None, "", ROUTER) and not _is_of_dynamo(flags)
    can_be_enabled = is_plain or is_wrapped
    is_variable = can_be_enabled and is_enabled()
    plugins = os.environ.get(_PLUGINS)
    by_variable = is_variable and (plugins is None or "kvobs" in plugins.split(","))
    if by_variable or (is_rewritten and router is Router.STOCK):
        router = Router.KVOBS
    version, changed = vllm_source.vllm_version(), rewrite(config)
    result = CheckResult(router, by_variable, version, changed, is_single=is_single, conditions=flags.conditions)
    result.is_elsewhere, result.holes = flags.is_elsewhere, holes
    result.add(*slips)
    if router is not Router.KVOBS and not is_rewritten and not slips:
        more = f", or start vLLM with {ENABLE_VARIABLE}=1" if can_be_enabled and not is_enabled() else ""
        result.add(_warn_of_other_router(config, router, plugins if is_variable else None, more))
    elif (image := flags.environment.get(IMAGE)) and "PYTHONPATH" not in flags.environment and not is_rewritten:
        result.add(kinds.IMAGE.at("image", image=show(image)))
    _check_entries(result)
    result.add(*rules.check_entries(result.config, is_stock=router is Router.STOCK))
    result.add(*rules.ignored_variables(result.config, flags.environment))
    if not is_rewritten:
        result.add(*(rules.missing_libraries_of(result.config) if result.vllm is not None else ()))
        result.add(*peers.side_channels(result, flags))
        result.of_blocks = peers.of_blocks(flags)
    result.add(*rules.check_memory(result.config, flags))
    if result.vllm is None:
        result.off["classes"] = "vLLM is not installed here: connector classes were not checked"
    _check_telemetry(result, flags)
    _check_effects(result, flags)
    _note_options_that_are_off(result)
    return result


def _warn_of_other_router(config: Mapping[str, Any], router: Router, plugins: str | None, more: str) -> Finding:
    if plugins is not None:
        return kinds.PLUGINS.at(f"environment variable {_PLUGINS}", plugins=plugins)
    if router is not Router.STOCK:
        why = "" if router is Router.NONE else f": {PD_ROUTER} routes, which asks only its first connector for hits"
        return kinds.OFF.at("kv_connector", why=why, more=more)
    extra = config.get(PATH)
    ignored = ", and kvobs's options are ignored" if isinstance(extra, Mapping) and "kvobs" in extra else ""
    return kinds.OFF.at("kv_connector_module_path", why=f": vLLM's own MultiConnector routes{ignored}", more=more)


def _check_entries(result: CheckResult) -> None:
    """Check the top level, kvobs's options, and each connector's entry."""
    keys = vllm_source.transfer_keys()  # of the installed vLLM, if there is one
    transfer_class = versions.transfer_config_with(keys) if keys else versions.TransferConfig
    result.add(*validation.transfer_config(result.config, "", transfer_class)[1])
    policy = result.config.get("kv_load_failure_policy", "fail")
    result.failure_policy = policy if policy in ("fail", "recompute") else "fail"
    extra = result.config.get(PATH, {})
    if not isinstance(extra, Mapping):
        return
    result.validated = validated = validation.validate(extra, policy, transfer_class)
    result.options = validated.configuration.options
    result.add(*validated.mistakes, *validated.warnings)
    for name, entry in validated.entries.values():
        role = entry.get("kv_role")
        is_best_effort = name in result.options.best_effort
        connector = ConnectorResult(name, entry["kv_connector"], str(role) if role else None, is_best_effort)
        result.connectors.append(connector)


def _check_port(result: CheckResult, exporter: ExporterOptions | None, flags: Flags) -> None:
    """Warn if the exporter that will run could not listen here now; it may be running, or be for another machine."""
    if exporter is None or exporter.port is None:
        return
    extra = result.config.get(PATH)
    options = extra.get("kvobs") if isinstance(extra, Mapping) else None
    is_option = isinstance(options, Mapping) and "exporter" in options
    by_variable = not is_option and os.environ.get(EXPORTER_VARIABLE)
    path = f"environment variable {EXPORTER_VARIABLE}" if by_variable else f"{PATH}.kvobs.exporter"
    result.port = exporter.port
    if whose := flags.taken.get(exporter.port):
        result.add(kinds.PORT.at(path, port=exporter.port, whose=whose))
    is_of_container = ALONE in flags.environment or not flags.environment.get(NETWORK)
    result.add(*listening.findings(exporter, path, is_here=not (flags.is_elsewhere and is_of_container)))


def _check_telemetry(result: CheckResult, flags: Flags) -> None:
    """Find where metrics and spans go, which of them are lost, and why."""
    endpoint, options = flags.otlp_traces_endpoint, result.options
    # The part of vLLM's configuration that is read.
    vllm_config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
    tracing = TracingSettings.of(options, vllm_config)
    is_dynamo = _is_of_dynamo(flags)
    hidden = _hidden_by(flags, is_dynamo=is_dynamo)
    exporter = exporter_of(options.exporter, hidden)
    _check_port(result, exporter, flags)
    result.add(*_warn_of_start(exporter, flags))
    if is_dynamo:
        result.add(*_warn_of_dynamo(result, exporter))
    if flags.disable_log_stats and endpoint is not None:
        result.add(kinds.TRACES_UNCOUNTED.at("--disable-log-stats, --otlp-traces-endpoint"))
    else:
        result.add(*destinations.findings(options.exporter, hidden))
    if endpoint is not None and versions.has_rust_frontend():
        result.add(kinds.TRACES_OF_RUST.at("--otlp-traces-endpoint"))
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        result.add(kinds.ENDPOINT.at("--otlp-traces-endpoint"))
    result.metrics_go_to = destinations.metrics_go_to(options.exporter, hidden)
    result.spans_go_to = destinations.spans_go_to(options.exporter, hidden, tracing)
    result.off |= destinations.losses(options.exporter, hidden)
    if not tracing.is_on and "tracing" not in result.off:
        result.off["tracing"], warnings = sampling.why_off(options)
        result.add(*warnings)
    if not tracing.is_on or "tracing" in result.off:
        result.off["exemplars"] = "tracing is off"
        return
    result.tracing = "calls" if tracing.has_calls else "requests"
    if tracing.endpoint is None:
        result.off["joining clients' traces"] = "--otlp-traces-endpoint is not set: vLLM drops trace headers"


def _hidden_by(flags: Flags, *, is_dynamo: bool) -> Hidden | None:
    """Return what will keep vLLM's API server from showing metrics, as far as the launch and this environment show."""
    known = {
        destinations.STATS_OFF: flags.disable_log_stats,
        destinations.RUST: versions.has_rust_frontend(),
        destinations.SEVERAL: flags.api_server_count > 1,
        destinations.MULTIPROCESS: is_dynamo or versions.has_multiprocess_metrics(),
        destinations.RAY: flags.launcher == RAY,
    }
    return next((hidden for hidden, applies in known.items() if applies), None)


def _warn_of_start(exporter: ExporterOptions | None, flags: Flags) -> Iterator[Finding]:
    """Yield what can't work at the place where the engine is started."""
    is_inside = CONTAINER in flags.environment and flags.launcher != DYNAMO_VLLM
    if is_inside and exporter is not None and not _is_seen(exporter):
        yield kinds.NOT_SEEN.at(f"{PATH}.kvobs.exporter", host=exporter.host)
    for port, whose in flags.nixl_taken.items():
        yield kinds.NIXL_PORT.at(f"environment variable {NIXL_PORT}", port=port, whose=whose)


def _is_seen(exporter: ExporterOptions) -> bool:
    """Return whether metrics leave the machine: the exporter sends them, or its host is reached from elsewhere."""
    try:
        return exporter.port is None or is_reached_from_elsewhere(exporter.host)
    except OSError:
        return True  # an unknown name is found with the ports


def _is_of_dynamo(flags: Flags) -> bool:
    return flags.launcher == DYNAMO_VLLM or any(map(_OF_DYNAMO.match, os.environ))


def _warn_of_dynamo(result: CheckResult, exporter: ExporterOptions | None) -> Iterator[Finding]:
    """Yield the metrics and events that NVIDIA Dynamo does not get."""
    if exporter is None or not _is_seen(exporter):
        where = "which is switched off" if exporter is None else f"at {exporter.host}"
        yield kinds.DYNAMO_METRICS.at(DYNAMO_VLLM, where=where)
    is_combined = os.environ.get(_CONSOLIDATOR, "true").strip().lower() in ("1", "true", "on", "yes")
    if is_combined and any(connector.kv_connector == "DynamoConnector" for connector in result.connectors):
        yield kinds.DYNAMO_EVENTS.at(DYNAMO_VLLM)


def _check_effects(result: CheckResult, flags: Flags) -> None:
    """Warn about options without the intended effect, and about files that the engine would refuse on this machine."""
    options, place = result.options, f"{PATH}.kvobs"
    connectors = [connector.kv_connector for connector in result.connectors]
    is_single, slow = len(connectors) == 1, "best_effort_slow_ms" in options.model_fields_set
    useless = [
        ("load_policy", options.load_policy == "longest" and is_single, "it compares connectors, and there is one"),
        ("wait_for", options.wait_for == "earlier" and is_single, "there is one connector"),
        ("best_effort_slow_ms", slow and not options.best_effort, "best_effort is empty"),
        ("tracing.propagate", options.tracing.propagate and "tracing" in result.off, "nothing is traced"),
    ]
    for option, is_so, why in useless:
        if is_so and connectors:
            result.add(kinds.USELESS.at(f"{place}.{option}", why=why))
    path = options.request_log
    if path not in (None, "stderr") and (problem := _refusal(Path(path))):
        result.add(kinds.REQUEST_LOG.at(f"{place}.request_log", path=show(path), problem=problem))
    for i, name in enumerate(connectors):
        if name == "ExampleConnector" and flags.has_chunked_prefill:
            result.add(kinds.CHUNKS.at(f"{validation.path_of(i)}.kv_connector"))
    for name, is_odd, unit in (
        ("stuck_after_s", options.stuck_after_s >= _HOUR_S, "seconds"),
        ("slow_load_ms", options.slow_load_ms < _FEW_MS, "milliseconds"),
    ):
        if is_odd:
            result.add(kinds.UNUSUAL.at(f"{place}.{name}", value=getattr(options, name), unit=unit))


def _refusal(path: Path) -> str | None:
    """Return why the engine could not write a log to a file; None if it can, or makes it."""
    if path.is_dir():
        return "it is a folder"
    return None if path.parent.is_dir() else f"{path.parent} is missing"


def _note_options_that_are_off(result: CheckResult) -> None:
    options, off = result.options, result.off
    if not options.best_effort:
        off["best-effort"] = "kvobs.best_effort is empty: an exception in a connector crashes the engine"
    if not options.request_report and options.request_log is None:
        off["request reports"] = "neither kvobs.request_report nor kvobs.request_log is set"
    if options.lookup_timeout_ms is None:
        off["lookup timeout"] = "kvobs.lookup_timeout_ms is not set: a connector may answer 'not yet' without limit"
