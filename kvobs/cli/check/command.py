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

from kvobs.cli.check.check import Checked, Flags, check_classes, check_text
from kvobs.cli.check.live import Looked, look
from kvobs.cli.check.report import as_dict, lay_out_classes, lay_out_live, lay_out_text, lines, verdict
from kvobs.cli.check.source import LAUNCHER, Router, Source, read
from kvobs.cli.output import examples
from kvobs.cli.web import CaCert, Cert, Key, url_of, use_certificates
from kvobs.schema.findings import Finding

_PROMETHEUS_PORT = 9090
_OF_CHECK = re.compile(r"(KVOBS|OTEL|DYN)_|VLLM_(PLUGINS|USE_RUST_FRONTEND)$|PROMETHEUS_MULTIPROC_DIR$")
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
    api_server_count: Annotated[int, typer.Option(min=1, help="As given to vLLM.")] = 1,
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
        flags = [_flags(each.flags, disable_log_stats, otlp_traces_endpoint, api_server_count) for each in sources]
    except ValueError as error:
        fix = "give the JSON of --kv-transfer-config, a vllm serve line, a file with either, YAML with engines, or -"
        checked = [Checked(Router.NONE, mistakes=[Finding("CONFIG", str(error), fix=fix)])]
        _print_findings(out, checked[0])
    else:
        check_one = _rewrite if should_rewrite else _check
        try:
            checked = [check_one(source, of_engine, out) for source, of_engine in zip(sources, flags, strict=True)]
        except KeyboardInterrupt:
            Console(stderr=True).print("Stopped.", style="yellow")
            raise typer.Exit(130) from None
    if as_json and not should_rewrite:
        for each in checked:
            typer.echo(json.dumps(as_dict(each)))
    raise typer.Exit(1 if any(each.mistakes for each in checked) else 0)


def _flags(given: Mapping[str, Any], disable_log_stats: bool, otlp_traces_endpoint: str | None, servers: int) -> Flags:
    """Return vLLM's options: those of this command, else those beside the configuration."""
    of_host = "data-parallel-size-local" if "data-parallel-size-local" in given else "data-parallel-size"
    return Flags(
        disable_log_stats or _is_on(given, "disable-log-stats"),
        otlp_traces_endpoint or (str(endpoint) if (endpoint := given.get("otlp-traces-endpoint")) else None),
        servers if servers > 1 else _number(given, "api-server-count", servers),
        _number(given, "port", 8000) if given else None,
        max(1, _number(given, of_host, 1)),
        bool(given) and not given.get("no-enable-chunked-prefill") and _is_on(given, "enable-chunked-prefill", "on"),
        given.get(LAUNCHER, ""),
    )


def _is_on(given: Mapping[str, Any], name: str, default: str = "0") -> bool:
    return str(given.get(name, default)).lower() not in ("false", "0", "none")


def _number(given: Mapping[str, Any], name: str, default: int) -> int:
    value = str(given.get(name, default))
    if not value.isdecimal():
        raise ValueError(f"--{name} {value}, beside the configuration, is not a whole number")
    return int(value)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables of the engine that the check looks at."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if _OF_CHECK.match(name)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check(source: Source, flags: Flags, out: Console) -> Checked:
    """Check the text and print the results, then the classes and theirs, then the verdict."""
    if source.place:
        out.print(Text(f"\n{source.place}\n", "bold"))
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
