"""The command ``kvobs demo``, from end to end: model, server, load, report."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.markup import escape

from kvobs.cli.scrapes import fetch
from kvobs.cli.summary.rows import ServerSums, server_sums
from kvobs.cli.summary.screen import Picture
from kvobs.cli.summary.sources import SETTLE_S
from kvobs.cli.web import NoAnswerError
from kvobs.demo import load
from kvobs.demo.tree import tree
from kvobs.export.numbers import Scrape, Values
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.spans import LOAD
from kvobs.testing.collector import Collector, ReceivedSpan
from kvobs.testing.model import make_model
from kvobs.testing.server import CORES, HOST, Server, ServerError, claim_port, cores

NAMES = ("cpu", "disk")
LOG = "server.log"
HOST_MEMORY = 64 * 2**20
ARRIVE_S = 5.0
"""Time for spans to reach the collector, at most."""
REQUEST = "llm_request"
"""vLLM's own span of a request."""
ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Environment variable with a collector to use instead of the demo's own."""
STACK = "docker compose --profile cpu up --build     # the boards: http://localhost:3000/d/kvobs-overview"
PAUSE_S = 5.0
"""Between two rounds of a load that is repeated."""
EXPORTER_PORT = ExporterOptions().port or 0
"""Port of the exporter if the server's port is also given; else a free one is picked."""


@dataclass(frozen=True)
class Fault:
    """A fault of the connector ``cpu``: the tensor parallel size that it needs, and the metrics that show it."""

    name: str
    says: str
    ranks: int
    is_best_effort: bool
    shown_by: tuple[signals.Signal, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of kvobs that find it."""
    logged: str = ""
    """What lines of the log about it contain."""

    def lines(self, values: Values) -> Iterator[str]:
        """Yield the lines of /metrics that show it, with connector and own labels; a histogram as its mean."""
        sums: dict[tuple[str, str], float] = {}
        for (name, named), value in values.items():
            has = dict(named)
            for metric in self.shown_by:
                labels = ", ".join(f'{label}="{has[label]}"' for label in ("connector", *metric.labels) if label in has)
                if metric.kind is not signals.Kind.HISTOGRAM and name == metric.name and value:
                    yield f"{metric.name}{{{labels}}} {value:g}"
                elif name in (f"{metric.name}_sum", f"{metric.name}_count"):
                    sums[name, labels] = sums.get((name, labels), 0) + value
        for (name, labels), count in sums.items():
            if name.endswith("_count") and count:
                total = sums[f"{name.removesuffix('_count')}_sum", labels]
                yield f"{name.removesuffix('_count')}{{{labels}}} {total / count:.3g} s on average, {count:g} times"


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("slow-connector", "cpu reports each load 1.2 s late", 1, False, (signals.LOAD_DURATION, signals.LOADS)),
        Fault("failing-connector", "cpu is best-effort, and raises on each load", 1, True,
              (signals.CALL_ERRORS, signals.QUARANTINES, signals.LOADS, signals.RECOMPUTED_TOKENS)),
        Fault("slow-rank", "cpu's loads end 1.2 s later on rank 1 of two", 2, False,
              (signals.SLOWEST_RANK, signals.RANK_SKEW, signals.LOAD_DURATION)),
        Fault("wrong-bytes", "cpu's loads succeed, and bring the bytes of other blocks", 1, False,
              (signals.CORRUPT_BLOCKS, signals.VERIFIED_BLOCKS, signals.LOADS), {"verify": {"sample_ratio": 1.0}},
              "wrong bytes"),
    )
}  # fmt: skip


EXAMPLES = """\b
Examples:
  kvobs demo
  kvobs demo --keep --repeat --port 8000 --fault failing-connector"""


def demo(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 picks a free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Run until Ctrl-C, and keep the server's folder.")] = False,
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


@dataclass(frozen=True)
class Demo:
    """The demo's options, and its console."""

    console: Console
    port: int = 0
    keep: bool = False
    requests: int = 96
    fault: Fault | None = None
    host: str = HOST
    repeat: bool = False
    exporter: bool = False
    """Whether kvobs's metrics and spans leave by its exporter."""

    def run(self) -> ServerSums:
        """Run the demo and return its numbers.

        With `keep` the server runs until Ctrl-C, and its folder is kept. Raises `ServerError`.
        """
        with folder(keep=self.keep) as work, ExitStack() as stack:
            with Progress(self.console, "model") as step:
                make_model(work / "model")
                step.succeed("a Llama with random weights and one token per byte")
            config, ranks = multi_connector(host_memory(), files(work / "disk")), 1
            if self.fault:
                config, ranks = with_fault(self.fault, work), self.fault.ranks
            if self.exporter:
                port = claim_port(EXPORTER_PORT if self.port else 0)
                config["kv_connector_extra_config"]["kvobs"]["exporter"] = {"host": self.host, "port": port}
            collector = stack.enter_context(Collector())
            with Progress(self.console, "server") as step:
                args = ("--otlp-traces-endpoint", os.environ.get(ENDPOINT, collector.endpoint))
                env = {} if ENDPOINT in os.environ else collector.env
                env |= {"OTEL_BSP_SCHEDULE_DELAY": "500"}  # vLLM's own spans would take 5 s
                server = Server(
                    work / "model",
                    work / LOG,
                    config,
                    self.port,
                    args,
                    env | (on_one_core(ranks) if ranks > 1 else {}),
                    tensor_parallel=ranks,
                    on_progress=lambda _seconds, message: step.show(message),
                    host=self.host,
                )
                if self.exporter:
                    stack.callback(see_exporter_end, metrics_url(server))
                stack.enter_context(server)
                step.succeed(f"vLLM with kvobs is up on {server.url}")
                if self.exporter:
                    step.note(f"kvobs's metrics are at {metrics_url(server)}")
                    step.note(f"its status page is at {status_url(server)}")
            sums = self.measure(server)
            self.show_slowest_load(collector)
            self.look_further(server, work)
            if self.keep:
                self.wait_for_ctrl_c(server)
            return sums

    def measure(self, server: Server) -> ServerSums:
        before = reading(server)
        results = []
        with Progress(self.console, "load") as step:
            if self.fault:
                step.note(f"{self.fault.name}: {self.fault.says}")
            for result in load.run_rounds(server, self.requests, on_answer=step.count):
                results.append(result)
                line = f"{result.round.title:21} {len(result.answers):4} answers in {result.seconds:4.1f} s"
                step.note(line if self.fault else f"{line}  {result.round.says}")
            wrong = load.differing(results)
            if wrong and not (self.fault and self.fault.logged):
                raise server.failure(f"{len(wrong)} prompts got a different answer when their blocks were loaded.")
            same = "loaded or computed: the same answers, token for token"
            if self.fault and self.fault.logged:  # a tiny model may answer the same from wrong bytes
                same = "the same answers this time, although bytes were wrong"
            step.succeed(f"{len(wrong)} prompts got another answer than before, without an error" if wrong else same)
        time.sleep(SETTLE_S)
        after = reading(server)
        sums = server_sums("What each connector did", [(before, after)], None)
        self.console.print("", Picture([sums]), sep="\n", highlight=False)
        if self.fault:
            self.console.print(f"\n[bold]The fault in /metrics[/]: {self.fault.says}")
            self.copyable(*self.fault.lines(after.values))
            lines = server.log.read_text().splitlines() if self.fault.logged else []
            if logged := next((line for line in lines if self.fault.logged in line), None):
                self.console.print("\n[bold]The first line about it in vLLM's log[/]")
                self.copyable(logged)
        return sums

    def show_slowest_load(self, collector: Collector) -> None:
        deadline = time.monotonic() + ARRIVE_S
        spans: Sequence[ReceivedSpan] = ()
        while REQUEST not in [span.name for span in spans] and time.monotonic() < deadline:
            time.sleep(0.5)
            loads = [span for span in collector.spans if span.name.startswith(f"{LOAD.name} ")]
            slowest = max(loads, key=lambda span: span.end_ns - span.start_ns, default=None)
            spans = collector.trace(slowest.trace_id) if slowest else ()
        if spans:
            self.console.print("\nTrace of the slowest load (milliseconds since the trace began, duration):")
            self.console.print(tree(spans))

    def look_further(self, server: Server, work: Path) -> None:
        """Print commands that show more, each on a line that can be copied whole."""
        url = metrics_url(server)
        if self.keep:
            lines = [f"{sys.argv[0]} top {url.removesuffix('/metrics')}", f"curl -s {url} | grep kvobs_",
                     f"less {work / LOG}"]  # fmt: skip
            lines += [f"{status_url(server)}     # the status page, in a browser"] * self.exporter
        else:
            option, port = (" --exporter", EXPORTER_PORT) if self.exporter else ("", 8000)
            lines = [f"{sys.argv[0]} demo --keep --port 8000{option}     # keeps the server running until Ctrl-C",
                     f"curl -s http://{HOST}:{port}/metrics | grep kvobs_"]  # fmt: skip
            lines += [f"http://{HOST}:{port}/     # its status page, in a browser"] * self.exporter
        self.console.print("\n[bold]Next steps[/]")
        self.copyable(*lines, STACK)
        title = "\n[bold]With your vLLM[/]: list your own connectors, each configured as if it were alone"
        self.console.print(title)
        self.copyable(f"vllm serve MODEL --kv-transfer-config '{json.dumps(ON_A_GPU)}'")

    def copyable(self, *lines: str) -> None:
        """Print lines without wrapping them."""
        for line in lines:
            self.console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def wait_for_ctrl_c(self, server: Server) -> None:
        """Wait for Ctrl-C; raise `ServerError` if the server dies before."""
        self.console.print("\nThe server keeps running. [bold]Ctrl-C[/] stops it.")
        try:
            while True:
                server.check_alive()
                time.sleep(PAUSE_S if self.repeat else 1)
                if self.repeat:
                    for _ in load.run_rounds(server, self.requests):
                        pass
        except KeyboardInterrupt:
            self.console.print("\nStopped.")


class Progress:
    """A step in view: one line that changes on a terminal, a line every few seconds elsewhere."""

    EVERY_S = 5.0

    def __init__(self, console: Console, name: str) -> None:
        self.console, self.name, self.begin = console, name, time.monotonic()
        self.last, self.next_s = "", self.EVERY_S
        self.status = console.status(name)  # prints no line to a pipe or a file

    def __enter__(self) -> Self:
        self.status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.status.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def count(self, part: load.Round, done: int, total: int) -> None:
        self.show(f"{part.title}: {done} of {total}")

    def show(self, doing: str) -> None:
        """Show the activity of the step in a line that never wraps."""
        text = f"{self.name:8} {self.seconds:4.0f} s  {doing}"[: self.console.width - 3]
        self.status.update(escape(text))
        if not self.console.is_terminal and self.seconds >= self.next_s and doing != self.last:
            self.last, self.next_s = doing, self.seconds + self.EVERY_S
            self.note(text)

    def note(self, text: str) -> None:
        self.console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    def succeed(self, result: str) -> None:
        self.status.stop()
        self.console.print(f"[green]✓[/] {self.name:8} {self.seconds:4.1f} s  {escape(result)}", soft_wrap=True)


@contextmanager
def folder(*, keep: bool) -> Iterator[Path]:
    """Create a folder, removed at the end unless it should be kept, or contains the log of a failed server."""
    path = Path(tempfile.mkdtemp(prefix="kvobs-demo-"))
    try:
        yield path
    except ServerError:
        keep = keep or (path / LOG).exists()
        raise
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


def multi_connector(*connectors: dict[str, Any], names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Return a `--kv-transfer-config` that puts these connectors behind kvobs."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvobs",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors), "kvobs": {"names": list(names)}},
    }


def entry(kv_connector: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": kv_connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def host_memory(size: int = HOST_MEMORY) -> dict[str, Any]:
    """Return vLLM's offloading to host memory, with the spec that makes it run on a CPU; size in bytes."""
    spec = {"spec_name": "HostOffloadingSpec", "spec_module_path": "kvobs.demo.host_offload"}
    return entry("OffloadingConnector", cpu_bytes_to_use=size, **spec)


def files(path: Path) -> dict[str, Any]:
    """Return vLLM's file-based connector, which keeps whole prompts in a folder; for tensor parallel 1 only."""
    return entry("ExampleConnector", shared_storage_path=str(path))


def with_fault(fault: Fault, work: Path) -> dict[str, Any]:
    """Return the demo's configuration with this fault in the connector ``cpu``; the other one can serve instead."""
    faulty = host_memory()
    faulty["kv_connector"] = "FaultyOffloadingConnector"
    faulty["kv_connector_module_path"] = "kvobs.demo.host_offload"
    faulty["kv_connector_extra_config"]["fault"] = fault.name
    # The file-based one can't serve with several ranks.
    config = multi_connector(faulty, files(work / "disk") if fault.ranks == 1 else host_memory())
    config["kv_connector_extra_config"]["kvobs"] |= fault.options
    if fault.is_best_effort:
        config["kv_connector_extra_config"]["kvobs"]["best_effort"] = [NAMES[0]]
        config["kv_load_failure_policy"] = "recompute"
    return config


def metrics_url(server: Server) -> str:
    """Return where a server's kvobs metrics are: at its exporter if it has one."""
    extra = (server.kv_transfer_config or {}).get("kv_connector_extra_config", {})
    exporter = extra.get("kvobs", {}).get("exporter")
    return f"{server.url}/metrics" if exporter is None else f"http://{HOST}:{exporter['port']}/metrics"


def status_url(server: Server) -> str:
    """Return where the status page of a server's exporter is."""
    return metrics_url(server).removesuffix("metrics")


def see_exporter_end(url: str) -> None:
    """Ask an exporter for the last metrics of its engine, which has ended: then it also ends, and its port is free."""
    with suppress(OSError):
        for _ in range(50):
            urllib.request.urlopen(url, timeout=1).close()
            time.sleep(0.1)


def reading(server: Server) -> Scrape:
    """Read a server's metrics; kvobs's own from its exporter if it has one."""
    url, deadline = metrics_url(server), time.monotonic() + ARRIVE_S
    while True:
        try:
            return fetch(url, f"{server.url}/metrics")
        except NoAnswerError as error:  # an exporter starts while the engine does
            if time.monotonic() > deadline:
                raise server.failure(f"kvobs's metrics, {url}, can't be read: {error}.") from error
            time.sleep(0.2)


def on_one_core(ranks: int) -> dict[str, str]:
    """Return the environment that binds all ranks to one core: they spin while a load is pending."""
    return {CORES: "|".join(str(core) for core in cores(1) * ranks)}


ON_A_GPU = multi_connector(entry("OffloadingConnector", cpu_bytes_to_use=10 * 2**30), names=NAMES[:1])
"""What anybody may paste on a GPU, where vLLM needs no spec of kvobs; ExampleConnector needs chunked prefill off."""
