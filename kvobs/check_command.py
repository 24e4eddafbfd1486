"""The command ``kvobs check``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvobs import check as checking
from kvobs.check import Checked, Flags
from kvobs.check_report import as_dict, lay_out, lay_out_findings
from kvobs.findings import Finding, parse
from kvobs.readers import read_model
from kvobs.rewrite import Router, rewrite
from kvobs.topology import Engine

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="JSON that begins with {, a file of it, or - for stdin.")]
TpSize = Annotated[int, typer.Option("--tensor-parallel-size", "--tp", min=1, max=1024, help="As given to vLLM.")]
OtherTp = Annotated[
    int | None,
    typer.Option(
        "--remote-tensor-parallel-size",
        "--remote-tp",
        min=1,
        max=1024,
        help="The same of the engine on the other side: says who reads from whom.",
        show_default=False,
    ),
]

# Of the command `topology`, too.
KvHeads = Annotated[int | None, typer.Option(min=1, help="KV heads of the model.", show_default=False)]
Mla = Annotated[bool, typer.Option("--mla", help="The model uses MLA: one latent, whatever its heads.")]
ModelDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the model, whose config.json says both.", show_default=False),
]


def check(
    config: Config,
    *,
    should_rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Print the configuration with kvobs in it, and nothing else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    disable_log_stats: Annotated[bool, typer.Option("--disable-log-stats", help="As given to vLLM.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="As given to vLLM.", show_default=False)
    ] = None,
    api_server_count: Annotated[int, typer.Option(min=1, help="As given to vLLM.")] = 1,
    tensor_parallel_size: TpSize = 1,
    remote_tp: OtherTp = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block of the KV cache.")] = 16,
    remote_block_size: Annotated[int, typer.Option(min=1, help="The same on the other side.")] = 16,
    kv_heads: KvHeads = None,
    mla: Mla = False,
    model: ModelDir = None,
) -> None:
    """Say what a --kv-transfer-config will build, and every mistake in it; exit status 1 if there is one."""
    # vLLM says much on standard output while it loads, and this command's is for what was asked for.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    heads, is_mla = _model(kv_heads, mla, model, is_needed=remote_tp is not None)
    own, other = Engine(tensor_parallel_size, block_size), Engine(remote_tp or 1, remote_block_size)
    engines = (own, other) if remote_tp is not None else None
    flags = Flags(disable_log_stats, otlp_traces_endpoint, api_server_count, is_mla, heads, engines)
    try:
        parsed = parse(_text(config))
    except ValueError as error:
        fix = "give what --kv-transfer-config takes, a file of it, or -"
        checked = Checked(Router.NONE, mistakes=[Finding("CONFIG", str(error), fix)])
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
    """Return the JSON text that CONFIG stands for."""
    if config.lstrip()[:1] in ("{", "["):
        return config
    try:
        return sys.stdin.read() if config == "-" else Path(config).read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{config} is no text") from None
    except OSError as error:
        raise ValueError(f"{config[:200]}: {error.strerror}") from None


def _model(kv_heads: int | None, mla: bool, model: Path | None, *, is_needed: bool) -> tuple[int, bool | None]:
    """Return the model's KV heads, and whether it uses MLA: None where that was not told."""
    given = [model is not None, kv_heads is not None or mla]
    if all(given) or (is_needed and not any(given)):
        raise typer.BadParameter("allowed are the first two, or the last", param_hint="--kv-heads, --mla, --model")
    if model is not None:
        try:
            return read_model(model)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from None
    return kv_heads or 1, mla if any(given) else None
