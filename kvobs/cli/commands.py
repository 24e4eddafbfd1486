"""The command `kvobs`."""

import io
import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from kvobs.cli.check.command import EXAMPLES as CHECK_EXAMPLES
from kvobs.cli.check.command import check
from kvobs.cli.output import count, examples, fail
from kvobs.cli.web import CaCert, Cert, Key, pair_of, use_certificates
from kvobs.demo.scenarios import FAULTS
from kvobs.schema import __version__

app = typer.Typer(
    name="kvobs",
    help="See which KV connector served a vLLM request, and why a load was slow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut the names of options at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


dashboards = typer.Typer(no_args_is_help=True, help="Export dashboards, alerts and runbook.", rich_markup_mode=None)
app.add_typer(dashboards, name="dashboards")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have ASCII only


@app.command(
    short_help="Run a demonstration on this CPU.",
    epilog=examples("kvobs demo", "kvobs demo --keep --repeat --port 8000 --fault failing-connector"),
)
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
    signal.signal(signal.SIGTERM, _interrupt)
    if find_spec("vllm") is None:
        raise fail("kvobs demo needs vLLM: pip install 'kvobs[engine]' (for CPUs)")
    from kvobs.demo.run import Demo
    from kvobs.demo.server import ServerError

    try:
        Demo(console, port, keep, requests, FAULTS.get(fault or ""), host, repeat, exporter).run()
    except KeyboardInterrupt:
        errors.print("\nStopped. Nothing is left running.", style="yellow")
        raise typer.Exit(130) from None
    except ServerError as error:
        headline, _, rest = str(error).partition("\n")
        errors.print(headline, style="bold red", markup=False, soft_wrap=True)
        errors.print(rest, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


TpSize = Annotated[int, typer.Option(min=1, max=1024, help="Tensor parallel size.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV cache block.")]


@app.command(
    short_help="Print which ranks read from which.",
    epilog=examples(
        "kvobs topology --prefill-tp 4 --decode-tp 2 --kv-heads 8",
        "kvobs topology --prefill-tp 8 --decode-tp 2 --model ./DeepSeek-V3",
    ),
)
def topology(
    *,
    prefill_tp: TpSize,
    decode_tp: TpSize,
    prefill_block_size: BlockSize = 16,
    decode_block_size: BlockSize = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads of the model.")] = None,
    mla: Annotated[bool, typer.Option("--mla", help="The model uses MLA: one latent for all heads.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Its folder, whose config.json has both.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a range is [first, last].")] = False,
) -> None:
    """Print which decode rank reads which KV heads from which prefill ranks."""
    from kvobs.cli import topology
    from kvobs.topology import Engine

    if model is None and kv_heads is None and not mla:
        raise typer.BadParameter("give --kv-heads, --mla or --model", param_hint="--kv-heads, --mla, --model")
    if model is not None and (kv_heads is not None or mla):
        raise typer.BadParameter("give it without --kv-heads and --mla: its config.json has both", param_hint="--model")
    try:
        heads, is_mla = topology.read_model(model) if model else (kv_heads or 1, mla)
        pair = topology.Pair(
            Engine(prefill_tp, prefill_block_size), Engine(decode_tp, decode_block_size), heads, is_mla
        )
        pair.reads()
    except ValueError as error:
        raise fail(str(error)) from None
    if as_json:
        typer.echo(json.dumps(topology.as_dict(pair)))
    else:
        Console().print(topology.lay_out(pair))


@app.command(
    short_help="Show the connectors of running servers, live.",
    epilog=examples(
        "kvobs top localhost                  a vLLM server at its port 8000",
        "kvobs top gpu-1:9464+8000            an exporter, and its vLLM server's port",
        "kvobs top localhost --once --json    for scripts",
    ),
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
    from kvobs.cli.top.live import Top, Watch

    use_certificates(cacert, cert, key)
    if as_json and not once:
        raise typer.BadParameter("requires --once", param_hint="--json")
    try:
        watches = [Watch(url, interval, of_vllm) for url, of_vllm in dict.fromkeys(map(pair_of, urls))]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from None
    # SIGTERM must restore the terminal as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    view = Top(Console(highlight=False), watches, interval)
    try:
        if not once:
            view.run()
        elif not view.once(as_json=as_json):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        raise typer.Exit(130 if once else 0) from None


@app.command(
    short_help="Show what an engine's processes are in, or died in.",
    epilog=examples(
        "kvobs timeline                          all engines, running or dead",
        "kvobs timeline 21469                    a process by its pid, with all rows",
        "kvobs timeline --chrome calls.json.gz   all calls, for a trace viewer",
    ),
)
def timeline(
    wanted: Annotated[
        str | None, typer.Argument(metavar="ENGINE|PID", help="Only this engine, as printed, or this process.")
    ] = None,
    *,
    chrome: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the calls for https://ui.perfetto.dev; .gz compresses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the call that each process of an engine is in, or died in, its last exception, and its last minute."""
    from kvobs.cli.timeline import timeline

    timeline(wanted, chrome, as_json=as_json)


app.command(short_help="Check a --kv-transfer-config before it starts.", epilog=CHECK_EXAMPLES)(check)


@dashboards.command("export", epilog=examples("kvobs dashboards export ./kvobs-dashboards"))
def export_dashboards(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; created if missing.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files that differ.")] = False,
    grafana: Annotated[str, typer.Option(metavar="URL", help="Grafana's address, for links in alerts.")] = "",
    runbook: Annotated[str, typer.Option(metavar="URL", help="Address of your copy of the runbook.")] = "",
    job: Annotated[str, typer.Option(metavar="JOB", help="Scrape job of kvobs's metrics, instead of kvobs.")] = "",
    cluster: Annotated[
        str, typer.Option(metavar="LABEL", help="Label that distinguishes clusters, if it is not cluster.")
    ] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label of PodMonitor and PrometheusRule; repeatable.")
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Namespace of vLLM's pods; repeatable.")
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Threshold of alerts; repeatable.")
    ] = None,
) -> None:
    """Write Grafana boards, Prometheus rules, Kubernetes manifests, stack settings and the runbook to a folder.

    Example: kvobs dashboards export DIR --grafana https://grafana.example.org --label release=monitoring
    """
    from kvobs.cli import dashboards

    try:
        lists = [values or () for values in (label, namespace, threshold)]
        settings = dashboards.SiteSettings(grafana, runbook, job, cluster, *lists)
        files = dashboards.contents(settings)
        written = dashboards.export(folder, files, force=force)
    except ValueError as error:
        raise fail(str(error)) from None
    except OSError as error:
        raise fail(f"{error.filename or folder} can't be written: {error.strerror}") from None
    for path in written:
        typer.echo(folder / path)
    typer.echo(f"{count(len(written), 'file')} written, {len(files) - len(written)} unchanged")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
