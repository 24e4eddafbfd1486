"""The command ``kvobs summary``: what a run got from its connectors."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from kvobs.cli.output import examples, fail, warn
from kvobs.cli.summary.comparison import differences, pairs
from kvobs.cli.summary.rows import ServerSums
from kvobs.cli.summary.runs import run, wait
from kvobs.cli.summary.screen import Picture
from kvobs.cli.summary.sources import (
    SETTLE_S,
    Addresses,
    Host,
    Period,
    document,
    of_prometheus,
    of_texts,
    read_document,
    summed,
)
from kvobs.cli.times import seconds_of, time_of
from kvobs.cli.web import CaCert, Cert, Key, NoAnswerError, url_of, urls_of, use_certificates
from kvobs.export.texts import duration, printable
from kvobs.page import files

PROMETHEUS_PORT = 9090
NONE_HERE = (
    "found no running engine in {}: run this as the engine's user, on its machine, and in its container; or name "
    "the address of a server with --engine"
)
_BEHIND = "kvobs.command"

EXAMPLES = examples(
    "kvobs summary -- vllm bench serve ...        during a benchmark",
    "kvobs summary --for 10m                      for the next ten minutes",
    "kvobs summary --engine gpu-1 --since-start   since that server's start",
    "kvobs summary before.txt after.txt           between two saved texts",
    "kvobs summary --json -o a.json -- COMMAND    saved, then compared:",
    "kvobs summary --compare a.json -- COMMAND",
)


class SummaryCommand(TyperCommand):
    """Keeps what is behind ``--``, which is another command and no argument of this one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_BEHIND], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)


COMMAND = SummaryCommand


def summary(
    ctx: typer.Context,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[BEFORE] [AFTER] [-- COMMAND]", help="Saved texts of /metrics, or a summary as JSON."),
    ] = None,
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="Address of a server, as for kvobs top; repeatable. Default: all on this host."
        ),
    ] = None,
    for_: Annotated[str | None, typer.Option("--for", metavar="TIME", help="Count for so long: 90s, 10m, 2h.")] = None,
    since_start: Annotated[bool, typer.Option("--since-start", help="Count all since the engines' start.")] = False,
    prometheus: Annotated[str | None, typer.Option(metavar="URL", help="Read this Prometheus; needs --from.")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="ISO 8601, Unix time, now, or now-2h.")
    ] = None,
    to: Annotated[str, typer.Option(metavar="TIME", help="The same.")] = "now",
    compare: Annotated[Path | None, typer.Option(metavar="JSON", help="Compare with this saved summary.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Write Markdown.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a new file.")] = None,
    cacert: CaCert = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Sum up in one table what each connector did during a command, for some time, or since the start.

    The exit status is the command's.
    """
    use_certificates(cacert, cert, key)
    command: list[str] | None = ctx.meta.get(_BEHIND)
    ways = {
        "-- COMMAND": command is not None, "--for": for_ is not None, "--since-start": since_start,
        "BEFORE AFTER": bool(texts), "--prometheus": prometheus is not None,
    }  # fmt: skip
    _check(ways, command, texts or [], engine or [])
    if (from_ is not None) != (prometheus is not None):
        raise typer.BadParameter("--prometheus and --from need each other", param_hint="--from")
    if as_json and as_markdown:
        raise typer.BadParameter("give one of --json and --markdown", param_hint="--json")
    if output is not None and (output.exists() or not os.access(output.parent, os.W_OK)):  # not after the command
        why = (
            "exists: name another file"
            if output.exists()
            else "can't be written: its folder is not there, or not yours"
        )
        raise typer.BadParameter(f"{output} {why}", param_hint="--output")
    wait_s, status = None if for_ is None else seconds_of(for_, "--for"), 0
    try:
        before = read_document(compare) if compare is not None else None
        if texts:
            servers = of_texts(texts)
        elif prometheus is not None:
            servers = _of_prometheus(prometheus, from_ or "", to, engine or [])
        else:
            servers, status = _live(engine or [], command, wait_s)
    except NoSummaryError as error:
        fail(printable(str(error)))
        raise typer.Exit(error.status or 1) from None
    except (NoAnswerError, ValueError) as error:
        raise fail(printable(str(error))) from None
    _write(servers, before, output, as_json=as_json, as_markdown=as_markdown)
    raise typer.Exit(status)


def _check(ways: Mapping[str, bool], command: list[str] | None, texts: Sequence[Path], engine: Sequence[str]) -> None:
    """Raise ``BadParameter`` unless one way is asked for, and wholly."""
    asked = [way for way, is_asked in ways.items() if is_asked]
    if len(asked) != 1:
        found = f"found {' and '.join(asked)}; " if asked else ""
        raise typer.BadParameter(f"{found}give one of {', '.join(ways)}")
    if command == []:
        raise typer.BadParameter("found no command after --", param_hint="COMMAND")
    if len(texts) > 2:  # noqa: PLR2004
        raise typer.BadParameter(f"found {len(texts)} files; give two, or AFTER alone", param_hint="BEFORE AFTER")
    if engine and texts:
        raise typer.BadParameter("has no effect on saved texts", param_hint="--engine")


class NoSummaryError(Exception):
    """The command has run, and its numbers are not available."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def _live(engine: Sequence[str], command: Sequence[str] | None, wait_s: float | None) -> tuple[list[ServerSums], int]:
    """Return the numbers of servers that run, and the exit status of the command."""
    try:
        urls = list(dict.fromkeys(map(urls_of, engine)))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from None
    source = Addresses(urls) if urls else Host()
    before, status = source.read(), 0
    if command is None and not before:
        raise NoAnswerError(NONE_HERE.format(files.folder()))
    if command is None and wait_s is None:
        return summed(None, before), 0
    if command is not None:
        if not before:
            warn("no engine runs here yet: engines that the command starts are counted")
        status = run(command, source.look)
        time.sleep(SETTLE_S)
    else:
        typer.echo(f"counting for {duration(wait_s)}; Ctrl-C stops earlier", err=True)
        wait(wait_s or 0.0, source.look)
    try:
        source.look()
        after = source.read()
    except NoAnswerError as error:
        raise NoSummaryError(status, str(error)) from None
    if not after:
        raise NoSummaryError(status, NONE_HERE.format(files.folder()))
    return summed(before, after), status


def _of_prometheus(url: str, from_: str, to: str, engine: Sequence[str]) -> list[ServerSums]:
    now_s = time.time()
    period = Period(time_of(from_, "--from", now_s), time_of(to, "--to", now_s))
    if period.seconds <= 0:
        raise typer.BadParameter("is not before --to", param_hint="--from")
    try:
        base = url_of(f"localhost{url}" if url.startswith(":") else url, PROMETHEUS_PORT).removesuffix("/metrics")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prometheus") from None
    instances = [name for address in engine for name in _instances(address)]
    try:
        servers, warnings = of_prometheus(base, period, instances)
    except NoAnswerError as error:
        raise NoAnswerError(f"{base}: {error}") from None
    for warning in warnings:
        warn(warning)
    if not servers:
        raise ValueError(f"{base} has no metrics of kvobs in this time")
    return servers


def _instances(address: str) -> list[str]:
    """Return the instances, as Prometheus has them, of an exporter and of its vLLM by the port behind a ``+``."""
    if (pair := re.fullmatch(r"(.*):(\d+)\+(\d+)", address)) is None:
        return [address]
    return [f"{pair[1]}:{pair[2]}", f"{pair[1]}:{pair[3]}"]


def _write(
    servers: Sequence[ServerSums],
    before: Sequence[ServerSums] | None,
    output: Path | None,
    *,
    as_json: bool,
    as_markdown: bool,
) -> None:
    if as_json:
        text = (
            json.dumps(_compared(before, servers) if before is not None else document(servers), allow_nan=False) + "\n"
        )
    elif as_markdown:
        text = Picture(servers, before).markdown()
    else:
        console = Console(highlight=False, markup=False)
        if output is None:
            console.print(Picture(servers, before))
            return
        with console.capture() as capture:
            console.print(Picture(servers, before))
        text = capture.get()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        typer.echo(text, nl=False)  # or it would be lost
        raise fail(f"{output} can't be written: {os.strerror(error.errno or 0)}") from None


def _compared(before: Sequence[ServerSums], now: Sequence[ServerSums]) -> dict[str, Any]:
    """Return the differences of two runs for scripts."""
    servers = []
    for old, new in pairs(before, now):
        rows = [
            {"connector": each.connector, "measure": each.measure.field, "before": each.before, "now": each.now,
             "difference": each.size, "share": each.share}
            for each in differences(old, new)
        ]  # fmt: skip
        servers.append({"server": new.server, "differences": rows})
    return document(now) | {"compared": servers}
