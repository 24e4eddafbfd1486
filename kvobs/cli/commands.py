"""The command `kvobs`, and the table of its commands; each is imported when it is used."""

import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvobs.schema import __version__

COMMANDS = {
    "demo": ("kvobs.demo.run:demo", "Run a demonstration on this CPU."),
    "top": ("kvobs.cli.top.live:top", "Show the connectors of running servers, live."),
    "summary": ("kvobs.cli.summary.command:summary", "Sum up what a run got from its connectors."),
    "check": ("kvobs.cli.check.command:check", "Check a --kv-transfer-config before vLLM starts."),
    "exporter": ("kvobs.cli.exporter:exporter", "Serve the metrics of the engines on this host."),
    "trace": ("kvobs.cli.trace.command:trace", "Show slow and failed loads as waterfalls."),
    "timeline": ("kvobs.cli.timeline:timeline", "Show the current or last call of each engine process."),
    "dashboards": ("kvobs.cli.dashboards:app", "Export dashboards, alerts and runbook."),
}
"""Name -> module and function, or group of commands, and the line in the list of commands.

A function's module has the end of its help as ``EXAMPLES``, and may have the class of its command as ``COMMAND``.
"""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # a disk, a quota, a file at its limit


def load(name: str) -> Any:
    """Import a command."""
    module_name, _, attribute = COMMANDS[name][0].partition(":")
    module = import_module(module_name)
    found = getattr(module, attribute)
    if isinstance(found, typer.Typer):
        return get_command(found)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=getattr(module, "COMMAND", None), epilog=module.EXAMPLES)(found)
    return get_command(single)


class Commands(TyperGroup):
    """Commands by name and line of help; only the one that is used is imported."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in _FULL or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python raises again at its exit, when it flushes stdout
            sys.exit(f"the output can't be written: {error.strerror}")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest


app = typer.Typer(
    name="kvobs",
    cls=Commands,
    help="See which KV connector served a vLLM request, and why a load was slow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut the names of options at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_, _line) in COMMANDS.items():
    app.command(_name, short_help=_line)(lambda: None)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvobs {__version__}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[  # noqa: ARG001 its callback ends the command
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """See which KV connector served a vLLM request, and why a load was slow."""
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a size: rich would print nothing
        del os.environ["COLUMNS"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have ASCII only
