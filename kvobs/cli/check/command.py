"""The command ``kvobs check``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from kvobs.cli.check.check import Checked, Flags, check_classes, check_text
from kvobs.cli.check.live import Looked, look
from kvobs.cli.check.report import as_dict, lay_out_classes, lay_out_live, lay_out_text, lines, verdict
from kvobs.cli.check.source import Router, read
from kvobs.cli.output import examples
from kvobs.cli.topology import read_model
from kvobs.cli.web import url_of
from kvobs.schema.findings import Finding
from kvobs.topology import Engine

_PROMETHEUS_PORT = 9090
_WIDE = 1000  # columns of a pipe: tables take what they need

Config = Annotated[
    str | None,
    typer.Argument(
        show_default=False,
        help="The JSON, a vllm serve line, a file with either or vLLM's YAML file, or - for stdin.",
    ),
]
TpSize = Annotated[int, typer.Option("--tensor-parallel-size", "--tp", min=1, max=1024, help="As given to vLLM.")]
OtherTp = Annotated[
    int | None,
    typer.Option(
        "--remote-tensor-parallel-size",
        "--remote-tp",
        min=1,
        max=1024,
        help="Tensor parallel size of the other engine: shows which rank reads from which.",
        show_default=False,
    ),
]

# Used by the command `topology` too.
KvHeads = Annotated[int | None, typer.Option(min=1, help="KV heads of the model.", show_default=False)]
Mla = Annotated[bool, typer.Option("--mla", help="The model uses MLA: one latent for all heads.")]
ModelDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Model folder; KV heads and MLA are read from its config.json.", show_default=False
    ),
]


EXAMPLES = examples(
    "kvobs check kvobs.json",
    "kvobs check start-server.sh",
    "kvobs check vllm.yaml --json",
    """kvobs check "vllm serve MODEL --kv-transfer-config '{...}'\"""",
    "kvobs check --rewrite stock.json",
    "kvobs check --server localhost:9464 --prometheus localhost:9090",
)


def check(
    config: Config = None,
    *,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Look at a running server or its exporter instead.", show_default=False),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Look at this Prometheus: jobs, rules, exemplars.", show_default=False),
    ] = None,
    should_rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Print only the configuration, changed to use kvobs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    disable_log_stats: Annotated[bool, typer.Option("--disable-log-stats", help="As given to vLLM.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="As given to vLLM.", show_default=False)
    ] = None,
    api_server_count: Annotated[int, typer.Option(min=1, help="As given to vLLM.")] = 1,
    tensor_parallel_size: TpSize = 1,
    remote_tp: OtherTp = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV cache block.")] = 16,
    remote_block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV cache block of the other engine.")] = 16,
    kv_heads: KvHeads = None,
    mla: Mla = False,
    model: ModelDir = None,
) -> None:
    """Check a --kv-transfer-config and name every mistake in it; or look at running servers and their Prometheus.

    Exit status 1 if there is a mistake.
    """
    if (config is None) == (not server and prometheus is None):
        raise typer.BadParameter("give either the configuration, or --server and/or --prometheus", param_hint="CONFIG")
    if config is None:
        _look(server or [], prometheus, as_json=as_json)
    heads, is_mla = _model(kv_heads, mla, model, is_needed=remote_tp is not None)
    try:
        source = read(config)
        given = source.flags
        engine = Engine(_number(given, "tensor-parallel-size", tensor_parallel_size), block_size)
        flags = Flags(
            disable_log_stats or str(given.get("disable-log-stats", False)).lower() not in ("false", "0", "none"),
            otlp_traces_endpoint or given.get("otlp-traces-endpoint"),
            _number(given, "api-server-count", api_server_count),
            is_mla,
            heads,
            (engine, Engine(remote_tp, remote_block_size)) if remote_tp is not None else None,
        )
    except ValueError as error:
        fix = "give the JSON of --kv-transfer-config, a vllm serve line, a file with either or vLLM's YAML file, or -"
        checked = Checked(Router.NONE, mistakes=[Finding("CONFIG", str(error), fix=fix)])
        _print_findings(Console(stderr=should_rewrite, quiet=as_json and not should_rewrite), checked)
    else:
        try:
            if should_rewrite:
                checked = _rewrite(source.config, flags)
            else:
                checked = _check(source.config, flags, _console(is_quiet=as_json))
        except KeyboardInterrupt:
            Console(stderr=True).print("Stopped.", style="yellow")
            raise typer.Exit(130) from None
    if as_json and not should_rewrite:
        typer.echo(json.dumps(as_dict(checked)))
    raise typer.Exit(1 if checked.mistakes else 0)


def _check(config: Mapping[str, Any], flags: Flags, out: Console) -> Checked:
    """Check the text and print the results, then the classes and theirs, then the verdict."""
    checked = check_text(config, flags)
    out.print(lay_out_text(checked))
    _print_findings(out, checked)
    printed_off, printed = list(checked.off), [*checked.warnings, *checked.mistakes]
    if checked.vllm is not None:
        with _quiet_import():
            check_classes(checked, is_mla=flags.is_mla)
        out.print(lay_out_classes(checked, printed_off))
        _print_findings(out, checked, printed)
    out.print(verdict(checked), soft_wrap=True)
    return checked


def _rewrite(config: Mapping[str, Any], flags: Flags) -> Checked:
    """Print the configuration changed to use kvobs, which needs neither vLLM nor the connectors' libraries."""
    checked = check_text(config, flags, is_rewritten=True)
    _print_findings(Console(stderr=True), checked)
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


def _number(given: Mapping[str, Any], name: str, option: int) -> int:
    """Return the option of this command, unless it is the default and the configuration has another."""
    if option != 1 or name not in given:
        return option
    try:
        number = int(given[name])
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"--{name} beside the configuration is not a whole number above 0")
    return number


def _model(kv_heads: int | None, mla: bool, model: Path | None, *, is_needed: bool) -> tuple[int, bool | None]:
    """Return the model's KV heads, and whether it uses MLA (None if neither option says)."""
    given = [model is not None, kv_heads is not None or mla]
    if all(given) or (is_needed and not any(given)):
        raise typer.BadParameter("give --model, or --kv-heads and/or --mla", param_hint="--kv-heads, --mla, --model")
    if model is not None:
        try:
            return read_model(model)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from None
    return kv_heads or 1, mla if any(given) else None
