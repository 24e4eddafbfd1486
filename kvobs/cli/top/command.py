"""The command ``kvobs top``."""

import signal
from typing import Annotated

import typer
from rich.console import Console

from kvobs.cli.output import examples
from kvobs.cli.top.live import Top, Watch
from kvobs.cli.web import CaCert, Cert, Key, urls_of, use_certificates

EXAMPLES = examples(
    "kvobs top localhost                  a vLLM server at its port 8000",
    "kvobs top gpu-1:9464+8000            an exporter, and its vLLM server's port",
    "kvobs top localhost --once --json    for scripts",
)


def top(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            help="Address of a vLLM server, e.g. localhost:8000, or of its exporter, e.g. localhost:9464, or both as "
            "localhost:9464+8000.",
        ),
    ],
    *,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between scrapes.")] = 4.0,
    once: Annotated[bool, typer.Option("--once", help="Scrape twice, print the difference, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; requires --once.")] = False,
    cacert: CaCert = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Show each connector of running servers live: hits, loads, waits, errors, and the cost of telemetry."""
    use_certificates(cacert, cert, key)
    if as_json and not once:
        raise typer.BadParameter("requires --once", param_hint="--json")
    try:
        watches = [Watch(url, interval, of_vllm) for url, of_vllm in dict.fromkeys(map(urls_of, urls))]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    # SIGTERM must restore the terminal as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = Top(Console(highlight=False), watches, interval)
    try:
        if not once:
            view.run()
        elif not view.once(as_json=as_json):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        raise typer.Exit(130 if once else 0) from None
