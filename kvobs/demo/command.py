"""The command ``kvobs demo``."""

import signal
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from kvobs.demo.scenarios import FAULTS

EXAMPLES = """\b
Examples:
  kvobs demo
  kvobs demo --keep --repeat --port 8000 --fault failing-connector"""


def demo(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 picks a free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server running until Ctrl-C, and its folder.")] = False,
    requests: Annotated[int, typer.Option(min=16, max=10_000, help="Approximate number of requests to send.")] = 96,
    host: Annotated[str, typer.Option(help="Address to listen on: 127.0.0.1 or 0.0.0.0.")] = "127.0.0.1",
    repeat: Annotated[bool, typer.Option("--repeat", help="Repeat the load until Ctrl-C; requires --keep.")] = False,
    exporter: Annotated[
        bool, typer.Option("--exporter", help="Serve kvobs's metrics, and export spans, from a separate process.")
    ] = False,
    fault: Annotated[str | None, typer.Option(help=f"Inject a fault: {', '.join(FAULTS)}.")] = None,
) -> None:
    """Run a vLLM server with two KV connectors on this CPU, and show the numbers of each."""
    console, errors = Console(), Console(stderr=True)
    if fault is not None and fault not in FAULTS:
        raise typer.BadParameter(f"unknown fault {fault!r}; use one of: {', '.join(FAULTS)}", param_hint="--fault")
    if host not in ("127.0.0.1", "0.0.0.0"):
        raise typer.BadParameter(f"can't listen on {host!r}; use 127.0.0.1 or 0.0.0.0", param_hint="--host")
    if repeat and not keep:
        raise typer.BadParameter("requires --keep", param_hint="--repeat")
    # SIGTERM must stop the server as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if find_spec("vllm") is None:
        raise _fail(errors, "kvobs demo needs vLLM: pip install 'kvobs[engine]' (for CPUs)")
    from kvobs.demo.run import Demo
    from kvobs.demo.server import ServerError

    try:
        Demo(console, port, keep, requests, FAULTS.get(fault or ""), host, repeat, exporter).run()
    except KeyboardInterrupt:
        errors.print("\nStopped. Nothing is left running.", style="yellow")
        raise typer.Exit(130) from None
    except ServerError as error:
        raise _fail(errors, str(error)) from None


def _fail(errors: Console, says: str) -> typer.Exit:
    """Print an error, its first line in red; return the exit to raise."""
    headline, _, rest = says.partition("\n")
    errors.print(headline, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if rest:
        errors.print(rest, markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)
