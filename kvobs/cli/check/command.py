"""The command ``kvobs check``, and what it prints: text and JSON."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.cli.check import peers
from kvobs.cli.check.check import check_text
from kvobs.cli.check.classes import check_classes
from kvobs.cli.check.flags import NIXL_PORT, flags_of
from kvobs.cli.check.launch import NETWORK, UNKNOWN, Source
from kvobs.cli.check.result import CheckResult, ConnectorResult
from kvobs.cli.check.rewrite import Router
from kvobs.cli.check.source import read
from kvobs.cli.output import count, examples
from kvobs.cli.running import LiveResult, look
from kvobs.cli.web import CaCert, Cert, Key, url_of, use_certificates
from kvobs.schema import __version__, kinds
from kvobs.schema.config import ENABLE_VARIABLE
from kvobs.schema.findings import Finding

_PROMETHEUS_PORT = 9090
_OF_CHECK = re.compile(r"(KVOBS|OTEL|DYN)_|VLLM_(PLUGINS|USE_RUST_FRONTEND)$|PROMETHEUS_MULTIPROC_DIR$")
_WIDE = 1000  # columns of a pipe: tables take what they need

Config = Annotated[
    str | None,
    typer.Argument(help="The JSON, a vllm serve line, a file with either or with engines in YAML, or - for stdin."),
]

EXAMPLES = examples(
    "kvobs check kvobs.json",
    "kvobs check start-server.sh",
    "kvobs check values.yaml --json",
    """kvobs check "vllm serve MODEL --kv-transfer-config '{...}'\"""",
    "kvobs check --rewrite stock.json",
    "kvobs check --server localhost:9464 --prometheus localhost:9090",
)


def check(
    config: Config = None,
    *,
    server: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Check a running server or its exporter; repeatable.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="Check this Prometheus: jobs, rules, exemplars.")
    ] = None,
    should_rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Print only the configuration, changed to use kvobs.")
    ] = False,
    is_deep: Annotated[
        bool, typer.Option("--deep", help="Import vLLM and the connectors' classes, which takes seconds.")
    ] = False,
    place: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="In a file with several engines, check only the one with this heading."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    is_verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print tables: all that was found, and what is off.")
    ] = False,
    disable_log_stats: Annotated[bool, typer.Option("--disable-log-stats", help="As given to vLLM.")] = False,
    otlp_traces_endpoint: Annotated[str | None, typer.Option(metavar="URL", help="As given to vLLM.")] = None,
    api_server_count: Annotated[int | None, typer.Option(min=1, help="As given to vLLM.")] = None,
    cacert: CaCert = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Check a --kv-transfer-config and name every error in it; or look at running servers and their Prometheus.

    In a command line or a file with engines, it also reads vLLM's other options and the engines' environment
    variables. Exit status 1: there is an error, a server has a problem, or --rewrite cannot print a configuration.
    """
    if (config is None) == (not server and prometheus is None):
        raise typer.BadParameter("give either the configuration, or --server and/or --prometheus", param_hint="CONFIG")
    if config is None:
        use_certificates(cacert, cert, key)
        _look(server or [], prometheus, as_json=as_json, is_verbose=is_verbose)
    out = Console(stderr=True) if should_rewrite else _console(is_quiet=as_json)
    sources = read(config)
    if place is not None:
        places = ", ".join(source.location for source in sources)
        fix = None if places else "leave out --place: this is a single configuration"
        missing = kinds.NO_PLACE.at("CONFIG", fix=fix, location=place, locations=places)
        sources = [source for source in sources if source.location == place] or [Source(findings=(missing,))]
    given = {
        "disable-log-stats": disable_log_stats,
        "otlp-traces-endpoint": otlp_traces_endpoint,
        "api-server-count": api_server_count,
    }
    try:
        given = {name: value for name, value in given.items() if value}
        results = _check_all(sources, given, out, should_rewrite=should_rewrite, is_deep=is_deep, is_verbose=is_verbose)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped.", style="yellow")
        raise typer.Exit(130) from None
    if as_json and not should_rewrite:
        for result in results:
            typer.echo(json.dumps(as_dict(result)))
    raise typer.Exit(1 if any(result.mistakes or (should_rewrite and result.unknown) for result in results) else 0)


def _check_all(
    sources: list[Source], given: dict[str, Any], out: Console, *, should_rewrite: bool, is_deep: bool, is_verbose: bool
) -> list[CheckResult]:
    """Check each configuration, with vLLM's options that this command has; print the results, or what it becomes."""
    taken = dict[str, dict[int, str]]()  # by network: the exporters' ports, and whose they are
    results = [_check(source, given, taken, should_rewrite=should_rewrite, is_deep=is_deep) for source in sources]
    peers.compare({source.location: result for source, result in zip(sources, results, strict=True)})
    for source, result in zip(sources, results, strict=True):
        _print(source, result, out, should_rewrite=should_rewrite, is_verbose=is_verbose)
    if len(sources) > 1 and not should_rewrite:
        out.print("", verdict(*results), sep="\n")
    good = {
        source.location: result.config
        for source, result in zip(sources, results, strict=True)
        if should_rewrite and result.config and not (result.mistakes or result.unknown)
    }
    if good:
        typer.echo(json.dumps(good if len(sources) > 1 else next(iter(good.values())), indent=2))
    return results


def _check(
    source: Source, given: dict[str, Any], taken: dict[str, dict[int, str]], *, should_rewrite: bool, is_deep: bool
) -> CheckResult:
    """Check one configuration, and note the ports of its engine."""
    result = CheckResult(Router.NONE)
    if source.config is not None:
        ports = taken.setdefault(network := source.environment.get(NETWORK, ""), {})
        flags = flags_of(source.config, source.flags, source.environment, given=given, taken=ports)
        with _environment(source.environment), _quiet_import() if is_deep else nullcontext():
            result = check_text(source.config, flags, is_rewritten=should_rewrite, holes=source.holes)
            if not should_rewrite:
                check_classes(result, is_deep=is_deep)
        exporters = () if result.port is None else (result.port,)
        for kind, its in (("the exporter's", exporters), (f"{NIXL_PORT} of NixlConnector", flags.nixl)):
            whose = f"{kind} of {source.location}, if both run on one host"
            ports |= dict.fromkeys(its if network else (), whose)
    more = f", or start vLLM with {ENABLE_VARIABLE}=1, which needs no --rewrite" if should_rewrite else ""
    result.add(*(replace(each, fix=each.fix + more if each.path == "CONFIG" else each.fix) for each in source.findings))
    return result


def _print(source: Source, result: CheckResult, out: Console, *, should_rewrite: bool, is_verbose: bool) -> None:
    """Print what was found; but for --rewrite also who routes, the verdict, and tables if asked for."""
    if source.location and not (should_rewrite and verdict(result).plain == "no errors"):
        out.print(Text(f"\n{source.location}\n", "bold"))
    if result.connectors and not should_rewrite:
        out.print(headline(result), soft_wrap=True)
    _print_findings(out, result)
    if not should_rewrite:
        out.print(verdict(result), soft_wrap=True)
        if is_verbose:
            out.print(tables(result))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables of the engine that the check looks at."""
    before = dict(os.environ)
    try:
        for name, value in variables.items():
            if _OF_CHECK.match(name) and not UNKNOWN.search(value):
                with suppress(ValueError):  # a process can't have this value
                    os.environ[name] = value
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _look(servers: list[str], prometheus: str | None, *, as_json: bool, is_verbose: bool) -> NoReturn:
    """Look at running servers and their Prometheus, and print the result."""
    try:
        urls = list(dict.fromkeys(map(url_of, servers)))
        of_prometheus = None if prometheus is None else url_of(prometheus, _PROMETHEUS_PORT).removesuffix("/metrics")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    result = look(urls, of_prometheus)
    out = _console(is_quiet=as_json)
    for text in summaries(result):
        out.print(text, soft_wrap=True, highlight=False)
    _print_findings(out, result)
    out.print(verdict(result))
    if is_verbose:
        out.print(Group(Text(), *(_pairs(facts, where) for where, facts in result.facts.items())))
    if as_json:
        alerts = [asdict(alert) for alert in result.alerts]
        typer.echo(json.dumps({"facts": result.facts, "alerts": alerts, **_findings(result)}))
    raise typer.Exit(1 if result.mistakes else 0)


def _print_findings(out: Console, result: CheckResult | LiveResult) -> None:
    """Print each finding in one line, also in a pipe."""
    for line in lines(result):
        out.print(line, soft_wrap=True)


def _console(*, is_quiet: bool) -> Console:
    """Return standard output; a pipe has no width, unless COLUMNS gives one."""
    out = Console(quiet=is_quiet)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(quiet=is_quiet, width=_WIDE)


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Discard the output of vLLM, its plugins and libraries; a terminal shows a line until the import has ended."""
    errors = Console(stderr=True)
    if is_slow := errors.is_terminal and "vllm" not in sys.modules:
        errors.print("Importing vLLM to check the connectors' classes...", end="", style="dim")
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # before the copies: it takes the place of a closed stderr
    outputs = {fd: os.dup(fd) for fd in (1, 2)}
    try:
        for fd in outputs:
            os.dup2(nowhere, fd)
        yield
    finally:
        sys.stdout.flush()
        for fd, output in outputs.items():
            os.dup2(output, fd)
            os.close(output)
        os.close(nowhere)
        if is_slow:
            errors.file.write("\r\x1b[K")
            errors.file.flush()


# --- what is printed


def tables(result: CheckResult) -> Group:
    """Return the connectors, their properties together, and the disabled features; empty without a connector."""
    parts: list[RenderableType] = []
    if result.connectors:
        parts = [Text(), _connectors(result.connectors), Text(), _pairs(_together(result), "together"), Text()]
        parts += [_pairs(result.off, "off", "why")]
    return Group(*parts)


def summaries(result: LiveResult) -> Iterator[Text]:
    """Yield a line for each address with its versions and its connectors' states, or its jobs."""
    for where, facts in result.facts.items():
        of_server = f"kvobs {facts.get('kvobs')} in vLLM {facts.get('vLLM')}; connectors: {facts.get('connectors')}"
        yield Text(f"{where}: {of_server if 'kvobs' in facts else '; '.join(_of_prometheus(facts))}")


def _of_prometheus(facts: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name}: {facts[name]}" for name in ("jobs", "rules of kvobs") if name in facts)


def lines(result: CheckResult | LiveResult) -> Iterator[Text]:
    """Yield a line for each finding, with its fix."""
    levels = (("warning", "yellow", result.warnings), ("unknown", "cyan", result.unknown))
    if isinstance(result, LiveResult):
        yield from (Text.assemble(("alert:", "red"), f" {alert}") for alert in result.alerts)
    for title, style, findings in (*levels, (_word(result), "red", result.mistakes)):
        for finding in findings:
            text = Text(f"{title}: {finding}")
            text.stylize(style, 0, len(f"{title}: {finding.path}:"))
            yield text


def _word(result: CheckResult | LiveResult) -> str:
    """Return the name of one of its ``mistakes``: an outage is no error of a configuration."""
    return "problem" if isinstance(result, LiveResult) else "error"


def verdict(*results: CheckResult | LiveResult) -> Text:
    """Return the last line: the number of findings of each kind, and whether classes were left out."""
    levels = ("mistakes", "warnings", "unknown")
    mistakes, warnings, unknown = (sum(len(getattr(each, level)) for each in results) for level in levels)
    parts = [count(mistakes, _word(results[0])) if mistakes else f"no {_word(results[0])}s"]
    if unknown:
        parts.append(f"{unknown} not known here")
    if warnings:
        parts.append(count(warnings, "warning"))
    if alerts := sum(len(each.alerts) for each in results if isinstance(each, LiveResult)):
        parts.append(count(alerts, "alert"))
    has_gap = any(isinstance(each, CheckResult) and "classes" in each.off for each in results)
    gap = "; the connectors' classes were not checked" if has_gap else ""
    engines = f"{count(len(results), 'engine')}: " if len(results) > 1 else ""
    color = "red" if mistakes else "cyan" if unknown else "green"
    return Text(engines + ", ".join(parts) + gap, style=f"bold {color}")


def as_dict(result: CheckResult) -> dict[str, Any]:
    """Return the output as plain data; None: unknown without building the connector, or without vLLM."""
    same = ("vllm", "failure_policy", "tracing", "metrics_go_to", "spans_go_to", "off")
    return {
        "kvobs": __version__,
        "is_routed_by_kvobs": result.router is Router.KVOBS if result.config else None,
        "options": result.options.model_dump(mode="json"),
        **{name: getattr(result, name) for name in same},
        "connectors": [asdict(each) for each in result.connectors],
        **_findings(result),
    }


def _findings(result: CheckResult | LiveResult) -> dict[str, list[dict[str, str]]]:
    levels = {"errors": result.mistakes, "warnings": result.warnings, "unknown": result.unknown}
    return {name: [_finding(each) for each in found] for name, found in levels.items()}


def _finding(of: Finding) -> dict[str, str]:
    kind = {"kind": of.kind.name} if of.kind.name else {}
    return kind | {"path": of.path, "found": of.found, "allowed": of.allowed, "fix": of.fix}


def headline(result: CheckResult) -> Text:
    """Return who routes to how many connectors, and where metrics and spans go."""
    spans = "tracing is off" if result.tracing == "off" else f"spans go to {result.spans_go_to}"
    return Text(f"{_routing(result)}\nMetrics go to {result.metrics_go_to}; {spans}.")


def _routing(result: CheckResult) -> str:
    version = f"vLLM {result.vllm}" if result.vllm else "vLLM (not installed here)"
    between = f"{version} and {count(len(result.connectors), 'connector')}"
    if result.router is Router.KVOBS:
        by = ", enabled by KVOBS_ENABLE" if result.by_variable else ""
        return f"kvobs {__version__} routes between {between}{by}."
    return f"vLLM does not load kvobs with this configuration. With --rewrite kvobs would route between {between}."


def _connectors(connectors: Sequence[ConnectorResult]) -> Table:
    out = _table("", *(Text(connector.name) for connector in connectors))
    for row in ("kv_connector", "kv_role"):
        out.add_row(row, *(Text(getattr(connector, row) or "?", overflow="fold") for connector in connectors))
    out.add_row("best-effort", *("yes" if connector.is_best_effort else "no" for connector in connectors))
    return out


def _together(result: CheckResult) -> dict[str, str]:
    options, hit = result.options, {"first": "first connector with a", "longest": "connector with the longest"}
    return {
        "loads from": f"the {hit[options.load_policy]} hit",
        "a failed load": f"{'is recomputed' if result.failure_policy == 'recompute' else 'fails its request'} "
        f"(kv_load_failure_policy {result.failure_policy})",
        "tracing": result.tracing,
        "metrics go to": result.metrics_go_to,
        "spans go to": result.spans_go_to,
    }


def _pairs(rows: Mapping[str, str], *heads: str) -> Table:
    out = _table(*heads, *([""] * (2 - len(heads))))
    for name, text in rows.items():
        out.add_row(name, Text(text))
    return out


def _table(*heads: str | Text) -> Table:
    out = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        out.add_column(head, vertical="top", overflow="fold")
    return out
