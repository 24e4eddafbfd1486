"""The command ``kvobs exporter``: serve the metrics of a server's engines on this host, as a process or a sidecar."""

import signal
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from kvobs.cli.output import examples, fail
from kvobs.export.__main__ import log_to_stderr
from kvobs.export.process import await_server, serve
from kvobs.log import log
from kvobs.page.files import folder
from kvobs.schema.options import ExporterOptions
from kvobs.schema.verdicts import RUNBOOK

EXAMPLES = examples(
    "kvobs exporter                        the engines of the server that runs here",
    "kvobs exporter --host 0.0.0.0         reachable from other machines, as a sidecar",
)


def exporter(
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Serve /metrics, /healthz and the status page at this port.")] = 9464,
    web_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TLS settings, in the format of Prometheus exporters.")
    ] = None,
    *,
    otlp_metrics: Annotated[bool, typer.Option("--otlp-metrics", help="Also send the metrics by OTLP.")] = False,
    request_ids: Annotated[
        bool, typer.Option("--request-ids", help="Show request ids on the status page to every client.")
    ] = False,
    runbook: Annotated[str, typer.Option(metavar="URL", help="Address of your copy of the runbook.")] = RUNBOOK,
) -> None:
    """Serve kvobs's metrics, and export its spans, from the shared memory of the engines on this host.

    Run it as the engines' user, with the same /dev/shm. It waits for a server, and when that ends, for the next one.
    """
    try:
        options = ExporterOptions(
            host=host,
            port=port,
            web_config=str(web_config) if web_config else None,
            otlp_metrics=otlp_metrics,
            request_ids=request_ids,
            runbook=runbook,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise fail(f"--{str(first['loc'][0]).replace('_', '-')}: found {first['input']!r}: {first['msg']}") from None
    log_to_stderr()
    log.info("kvobs's exporter is waiting for an engine with pages in %s", folder())
    try:
        goes_on = True
        while goes_on:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            server, lock = await_server()
            goes_on = serve(server, options, lock)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
