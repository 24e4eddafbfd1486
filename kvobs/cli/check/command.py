"""The command ``kvobs check``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from kvobs.cli.check import check as checking
from kvobs.cli.check.asker import Asker
from kvobs.cli.check.check import Checked, Flags
from kvobs.cli.check.live import Looked, look
from kvobs.cli.check.report import as_dict, lay_out_classes, lay_out_live, lay_out_text, lines, verdict
from kvobs.cli.check.rewrite import Router, rewrite
from kvobs.cli.check.source import read
from kvobs.cli.top.servers import url_of
from kvobs.cli.topology import read_model
from kvobs.findings import Finding
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


EXAMPLES = """\b
Examples:
  kvobs check kvobs.json
  kvobs check start-server.sh
  kvobs check vllm.yaml --json
  kvobs check "vllm serve MODEL --kv-transfer-config '{...}'"
  kvobs check --rewrite stock.json
  kvobs check --server localhost:9464 --prometheus localhost:9090"""


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
    """Check a --kv-transfer-config: what it builds and every mistake in it; or running servers and their Prometheus.

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
        own = Engine(_number(given, "tensor-parallel-size", tensor_parallel_size), block_size)
        flags = Flags(
            disable_log_stats or str(given.get("disable-log-stats", False)).lower() not in ("false", "0", "none"),
            otlp_traces_endpoint or given.get("otlp-traces-endpoint"),
            _number(given, "api-server-count", api_server_count),
            is_mla,
            heads,
            (own, Engine(remote_tp, remote_block_size)) if remote_tp is not None else None,
        )
    except ValueError as error:
        fix = "give the JSON of --kv-transfer-config, a vllm serve line, a file with either or vLLM's YAML file, or -"
        checked = Checked(Router.NONE, mistakes=[Finding("CONFIG", str(error), fix=fix)])
        if as_json:
            typer.echo(json.dumps(as_dict(checked)))
        else:
            _print_lines(Console(stderr=should_rewrite), checked)
        raise typer.Exit(1) from None
    if should_rewrite:
        _rewrite(source.config, flags)
    # The level is a part of what a kept answer depends on.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asker = Asker(source.config)
    try:
        if as_json:
            with _waiting(asker):
                checked = checking.check(source.config, flags, asker.answers)
            typer.echo(json.dumps(as_dict(checked)))
        else:
            checked = _report(source.config, flags, asker)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped.", style="yellow")
        raise typer.Exit(130) from None
    finally:
        asker.stop()
    raise typer.Exit(1 if checked.mistakes else 0)


def _look(servers: list[str], prometheus: str | None, *, as_json: bool) -> NoReturn:
    """Look at what runs, and print what was seen."""
    try:
        urls = list(dict.fromkeys(map(url_of, servers)))
        of_prometheus = None if prometheus is None else url_of(prometheus, _PROMETHEUS_PORT).removesuffix("/metrics")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    looked = look(urls, of_prometheus)
    if as_json:
        typer.echo(json.dumps(looked.as_dict()))
    else:
        out = _console()
        out.print(lay_out_live(looked))
        _print_lines(out, looked)
        out.print(verdict(looked))
    raise typer.Exit(1 if looked.mistakes else 0)


def _report(config: Mapping[str, Any], flags: Flags, asker: Asker) -> Checked:
    """Print what the text says at once, then what the classes say, then the verdict; return the whole result."""
    out = _console()
    text = checking.check(config, flags, None)
    if text.vllm is not None:
        del text.off["classes"]
    out.print(lay_out_text(text))
    _print_lines(out, text)
    if text.vllm is None:
        out.print(verdict(text))
        return text
    out.file.flush()
    with _waiting(asker):
        checked = checking.check(config, flags, asker.answers)
    out.print(lay_out_classes(checked, text.off))
    _print_lines(out, checked, text)
    out.print(verdict(checked), soft_wrap=True)
    return checked


def _rewrite(config: Mapping[str, Any], flags: Flags) -> NoReturn:
    """Print the configuration changed to use kvobs, which needs neither vLLM nor the connectors' libraries."""
    checked = checking.check(config, flags, None, is_for_here=False)
    if not checked.mistakes:
        config = rewrite(config)
        checked = checking.check(config, flags, None, is_for_here=False)
    _print_lines(Console(stderr=True), checked)
    if not checked.mistakes:
        typer.echo(json.dumps(config, indent=2))
    raise typer.Exit(1 if checked.mistakes else 0)


def _print_lines(out: Console, checked: Checked | Looked, before: Checked | None = None) -> None:
    """Print each finding in one line, also in a pipe; those that were printed before are left out."""
    warnings, mistakes = checked.warnings, checked.mistakes
    if before is not None:
        warnings = [finding for finding in warnings if finding not in before.warnings]
        mistakes = [finding for finding in mistakes if finding not in before.mistakes]
    for line in lines(warnings, mistakes):
        out.print(line, soft_wrap=True)


def _console() -> Console:
    """Return standard output; a pipe has no width, unless COLUMNS gives one."""
    out = Console()
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


def _waiting(asker: Asker) -> AbstractContextManager[object]:
    """Show on a terminal that vLLM's classes are being asked."""
    errors = Console(stderr=True)
    if not (asker.is_waiting and errors.is_terminal):
        return nullcontext()
    return errors.status("Importing vLLM to ask its connectors' classes; this takes seconds, and less the next time")


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
