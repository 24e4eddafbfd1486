"""The command ``kvobs check``."""

import json
import os
import re
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from kvobs.children.sync_loads import Conditions
from kvobs.cli.check.check import Checked, Flags, check_classes, check_text
from kvobs.cli.check.launch import LAUNCHER, NETWORK, Source
from kvobs.cli.check.live import Looked, look
from kvobs.cli.check.report import as_dict, lay_out_classes, lay_out_live, lay_out_text, lines, verdict
from kvobs.cli.check.source import Router, read
from kvobs.cli.output import examples
from kvobs.cli.web import CaCert, Cert, Key, url_of, use_certificates
from kvobs.schema.findings import Finding
from kvobs.vllm_api.versions import V2_RUNNER

_PROMETHEUS_PORT = 9090
_OF_CHECK = re.compile(r"(KVOBS|OTEL|DYN)_|VLLM_(PLUGINS|USE_RUST_FRONTEND)$|PROMETHEUS_MULTIPROC_DIR$")
_NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_FIX = "give the JSON of --kv-transfer-config, a vllm serve line, a file with either, YAML with engines, or -"
_WIDE = 1000  # columns of a pipe: tables take what they need

Config = Annotated[
    str | None,
    typer.Argument(help="The JSON, a vllm serve line, a file with either or YAML with engines in it, or - for stdin."),
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
        list[str] | None, typer.Option(metavar="URL", help="Look at a running server or its exporter instead.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="Look at this Prometheus: jobs, rules, exemplars.")
    ] = None,
    should_rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Print only the configuration, changed to use kvobs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    disable_log_stats: Annotated[bool, typer.Option("--disable-log-stats", help="As given to vLLM.")] = False,
    otlp_traces_endpoint: Annotated[str | None, typer.Option(metavar="URL", help="As given to vLLM.")] = None,
    api_server_count: Annotated[int | None, typer.Option(min=1, help="As given to vLLM.")] = None,
    cacert: CaCert = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Check a --kv-transfer-config and name every mistake in it; or look at running servers and their Prometheus.

    Of a line or a file with engines, vLLM's other options and the engines' variables are read too. Exit status 1 if
    there is a mistake.
    """
    if (config is None) == (not server and prometheus is None):
        raise typer.BadParameter("give either the configuration, or --server and/or --prometheus", param_hint="CONFIG")
    if config is None:
        use_certificates(cacert, cert, key)
        _look(server or [], prometheus, as_json=as_json)
    out = Console(stderr=True) if should_rewrite else _console(is_quiet=as_json)
    try:
        sources = read(config)
        if should_rewrite and len(sources) > 1:
            raise ValueError(f"{len(sources)} configurations: {', '.join(each.place for each in sources)}; give one")
    except ValueError as error:
        sources = [Source({}, problem=str(error))]
    own = ("disable-log-stats", disable_log_stats), ("otlp-traces-endpoint", otlp_traces_endpoint)
    given = {name: value for name, value in (*own, ("api-server-count", api_server_count)) if value}
    try:
        checked = _check_all(sources, given, out, should_rewrite)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped.", style="yellow")
        raise typer.Exit(130) from None
    if as_json and not should_rewrite:
        for each in checked:
            typer.echo(json.dumps(as_dict(each)))
    raise typer.Exit(1 if any(each.mistakes for each in checked) else 0)


def _check_all(sources: list[Source], own: dict[str, Any], out: Console, should_rewrite: bool) -> list[Checked]:
    """Check each configuration, with vLLM's options that this command has; print the results, or what it becomes."""
    all_checked = list[Checked]()
    taken: dict[str, dict[int, str]] = {"": {}}  # by network: the exporters' ports, and whose they are
    for source in sources:
        if source.place and not should_rewrite:
            out.print(Text(f"\n{source.place}\n", "bold"))
        network = source.environment.get(NETWORK, "")
        if source.problem:
            checked = Checked(Router.NONE, mistakes=[Finding("CONFIG", source.problem, fix=_FIX)])
            _print_findings(out, checked)
            out.print(verdict(checked))
        else:
            flags = _flags(source, own, taken.setdefault(network, {}))
            checked = (_rewrite if should_rewrite else _check)(source, flags, out)
            whose = f"the exporter's of {source.place}, if both run on one host"
            taken[network] |= dict.fromkeys(checked.ports if network else (), whose)
        all_checked.append(checked)
    if len(sources) > 1:
        out.print("", verdict(*all_checked), sep="\n")
    return all_checked


def _flags(source: Source, own: Mapping[str, Any], taken: Mapping[int, str]) -> Flags:
    """Return vLLM's options: those of this command, else those beside the configuration."""
    given, options = source.flags, {**source.flags, **own}
    is_one = _is_one_of_several(given)
    engines = 1 if is_one else max(1, int(given.get("data-parallel-size-local", given.get("data-parallel-size", 1))))
    ports = {int(given.get("port", 8000)): "--port of vLLM's API server"} if given else {}
    if engines > 1:
        ports[int(given.get("data-parallel-rpc-port", 29550))] = "--data-parallel-rpc-port"
    nixl = source.environment.get(_NIXL_PORT, os.environ.get(_NIXL_PORT, "5600"))
    if nixl.isdecimal() and "Nixl" in str(source.config):
        ports |= dict.fromkeys(range(int(nixl), int(nixl) + engines), f"{_NIXL_PORT} of NixlConnector")
    return Flags(
        _is_on(options, "disable-log-stats"),
        str(endpoint) if (endpoint := options.get("otlp-traces-endpoint")) else None,
        int(options.get("api-server-count", _api_servers(given))),
        engines,
        _is_left_on(given, "enable-chunked-prefill"),
        given.get(LAUNCHER, ""),
        _conditions(source),
        {**taken, **ports},
    )


def _conditions(source: Source) -> Conditions:
    """Return what is known of the engine's scheduling and runner; else vLLM's defaults on GPUs."""
    given = source.flags
    is_async = not given or _is_left_on(given, "async-scheduling")
    runner = source.environment.get(V2_RUNNER, os.environ.get(V2_RUNNER, "1"))
    steps = max(2 if is_async else 1, int(given.get("pipeline-parallel-size", 1)))
    return Conditions(steps=steps, has_v2_runner=runner.lower() not in ("0", "false"))


def _api_servers(given: Mapping[str, Any]) -> int:
    """Return how many API servers there are by default: `vllm serve` starts one for each engine that it balances."""
    if given.get(LAUNCHER) or _is_one_of_several(given) or _is_on(given, "enable-elastic-ep"):
        return 1
    is_hybrid = "data-parallel-start-rank" in given or _is_on(given, "data-parallel-hybrid-lb")
    return int(given.get("data-parallel-size-local" if is_hybrid else "data-parallel-size", 1)) or 1


def _is_one_of_several(given: Mapping[str, Any]) -> bool:
    """Return whether each engine of the group has a command and an API server, behind an external load balancer."""
    others = ("data-parallel-external-lb", "data-parallel-multi-port-external-lb")
    return "data-parallel-rank" in given or any(_is_on(given, other) for other in others)


def _is_left_on(given: Mapping[str, Any], name: str) -> bool:
    """Return whether vLLM's options are known, and leave on what is on by default."""
    return bool(given) and not given.get(f"no-{name}") and _is_on(given, name, "on")


def _is_on(given: Mapping[str, Any], name: str, default: str = "0") -> bool:
    return str(given.get(name, default)).lower() not in ("false", "0", "none")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables of the engine that the check looks at."""
    before = dict(os.environ)
    known = {name: value for name, value in variables.items() if _OF_CHECK.match(name) and value != f"${name}"}
    os.environ.update(known)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check(source: Source, flags: Flags, out: Console) -> Checked:
    """Check the text and print the results, then the classes and theirs, then the verdict."""
    with _environment(source.environment):
        checked = check_text(source.config, flags)
        checked.add(warnings=source.warnings)
        out.print(lay_out_text(checked))
        _print_findings(out, checked)
        printed_off, printed = list(checked.off), [*checked.warnings, *checked.mistakes]
        if checked.vllm is not None:
            with _quiet_import():
                check_classes(checked)
            out.print(lay_out_classes(checked, printed_off))
            _print_findings(out, checked, printed)
    out.print(verdict(checked), soft_wrap=True)
    return checked


def _rewrite(source: Source, flags: Flags, out: Console) -> Checked:
    """Print the configuration changed to use kvobs, which needs neither vLLM nor the connectors' libraries."""
    with _environment(source.environment):
        checked = check_text(source.config, flags, is_rewritten=True)
    checked.add(warnings=source.warnings)
    _print_findings(out, checked)
    if not checked.mistakes:
        typer.echo(json.dumps(checked.config, indent=2))
    return checked


def _look(servers: list[str], prometheus: str | None, *, as_json: bool) -> NoReturn:
    """Look at running servers and their Prometheus, and print the result."""
    try:
        urls = list(dict.fromkeys(map(url_of, servers)))
        of_prometheus = None if prometheus is None else url_of(prometheus, _PROMETHEUS_PORT).removesuffix("/metrics")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    looked = look(urls, of_prometheus)
    out = _console(is_quiet=as_json)
    out.print(lay_out_live(looked))
    _print_findings(out, looked)
    out.print(verdict(looked))
    if as_json:
        typer.echo(json.dumps(asdict(looked)))
    raise typer.Exit(1 if looked.mistakes else 0)


def _print_findings(out: Console, checked: Checked | Looked, printed: Container[Finding] = ()) -> None:
    """Print each finding that is not printed yet in one line, also in a pipe."""
    for line in lines(checked.warnings, checked.mistakes, printed):
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
