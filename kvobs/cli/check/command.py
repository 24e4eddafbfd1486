"""The command ``kvobs check``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvobs.cli.check import check as checking
from kvobs.cli.check.check import Checked, Flags
from kvobs.cli.check.report import as_dict, lay_out, lay_out_findings
from kvobs.cli.check.rewrite import Router, rewrite
from kvobs.cli.topology import read_model
from kvobs.findings import Finding
from kvobs.topology import Engine

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The JSON itself, a file with it, or - for stdin.")]
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


def check(
    config: Config,
    *,
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
    """Check a --kv-transfer-config: what it builds and every mistake in it. Exit status 1 if there is a mistake."""
    # vLLM logs to standard output while it loads; this command's standard output is for its result only.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    heads, is_mla = _model(kv_heads, mla, model, is_needed=remote_tp is not None)
    own, other = Engine(tensor_parallel_size, block_size), Engine(remote_tp or 1, remote_block_size)
    engines = (own, other) if remote_tp is not None else None
    flags = Flags(disable_log_stats, otlp_traces_endpoint, api_server_count, is_mla, heads, engines)
    try:
        parsed = parse(_text(config))
    except ValueError as error:
        fix = "give the JSON of --kv-transfer-config, a file with it, or -"
        checked = Checked(Router.NONE, mistakes=[Finding("CONFIG", str(error), fix=fix)])
    else:
        with redirect_stdout(sys.stderr):
            checked = checking.check(parsed, flags)
            if should_rewrite and not checked.mistakes:
                parsed = rewrite(parsed)
                checked = checking.check(parsed, flags)
    if should_rewrite:
        Console(stderr=True).print(lay_out_findings(checked))
        if not checked.mistakes:
            typer.echo(json.dumps(parsed, indent=2))
    elif as_json:
        typer.echo(json.dumps(as_dict(checked)))
    else:
        Console().print(lay_out(checked))
    raise typer.Exit(1 if checked.mistakes else 0)


def _text(config: str) -> str:
    """Return the JSON text of the argument CONFIG."""
    if config.lstrip()[:1] in ("{", "["):
        return config
    try:
        return sys.stdin.read() if config == "-" else Path(config).read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{config} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{config[:200]}: {error.strerror}") from None


def parse(text: str) -> Mapping[str, Any]:
    """Parse the JSON text of a configuration.

    Raises:
        ValueError: it is not valid JSON, or not an object; names the place.
    """
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError("the configuration is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the configuration is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the configuration is a {type(config).__name__}, needs an object with the key 'kv_connector'")
    return config


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
