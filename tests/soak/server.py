"""The soak on a real server: two ranks, a steered connector beside vLLM's own, and a collector that comes and goes."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from kvobs.demo.run import HOST_MEMORY, host_memory
from kvobs.testing.model import make_model
from kvobs.testing.server import Server
from tests.engine import serving
from tests.engine.exported import Exported, with_exporter
from tests.engine.metered import configuration
from tests.engine.readings import IDLE_S
from tests.soak.memory import Sample
from tests.soak.orders import COUNTED, NEVER, Order, draw, expected
from tests.soak.report import Result
from tests.support.grpc_collector import GrpcCollector

AT_ONCE = 24  # requests
EVERY = 500  # requests after which the server goes idle, memory is looked at, and the collector's mood changes
BLOCKS = 768  # of the KV cache: few, so that all are soon in use, and repeated prompts come back from host memory
REPEATED = 12  # prompts that are asked again and again
STUCK_AFTER_S = 4.0
NEVER_REPORTED = 8  # requests of each kind
MOODS = ("up", "down", "up", "hanging")
PARTS = {"API server": "", "EngineCore": "EngineCor", "workers": "Worker"}
STEERED = "steered"
API_SERVER_KIB = 4.0
"""What vLLM's API server grows by with each request when no connector is configured."""
WORKERS_MIB = 128
"""What the workers may still grow by when warm: with vLLM's own MultiConnector they grow as with kvobs."""
WORKERS_FILLED = 20_000
"""Requests after which the workers have used all of their caches once; over fewer ones their memory is no measure."""


class Client:
    """Sends orders, checks every answer, and keeps count of what was carried out."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.seed = server, seed
        self._known: dict[str, tuple[int, ...]] = {}
        self.made: Counter[Order] = Counter()

    def send(self, orders: Iterable[tuple[int, Order]]) -> None:
        """Carry out numbered orders, some at once; raise for any answer that is not as it must be."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self.made.update(pool.map(lambda numbered: self._carry_out(*numbered), orders))

    def _carry_out(self, number: int, order: Order) -> Order:
        random = Random(f"{self.seed} {number}")
        about = ("repeated", number % REPEATED) if order.is_repeated else ("soak", self.seed, number)
        text, tokens = serving.prompt(*about)[:100], 4 if order.is_repeated else random.randint(1, 6)
        params = {"steer": {STEERED: order.delayed(random)}}
        if order.hangs_up_after_s is not None:
            serving.hang_up(self.server, order.hangs_up_after_s, text, kv_transfer_params=params)
            return order
        answer = self.server.complete(text, tokens, kv_transfer_params=params).tokens
        assert len(answer) == tokens, f"order {number} ({order.name}): {len(answer)} tokens instead of {tokens}"
        if order.is_repeated:
            known = self._known.setdefault(text, answer)
            assert known == answer, f"order {number} ({order.name}): a load changed what is answered"
        return order


def run(requests: int, seed: int, show: Callable[[str], None], *, has_exporter: bool = False) -> Result:
    """Serve ``requests`` random orders, and compare what the server, or its exporter, counted with what was ordered."""
    own = {
        "API server": API_SERVER_KIB * requests / 1024,
        "workers": WORKERS_MIB if requests >= WORKERS_FILLED else math.inf,
    }
    result = Result(
        "On a server with the exporter" if has_exporter else "On a server",
        budget_mib=5,
        budgets={part: 5 + mib for part, mib in own.items()},
    )
    folder = Path("build/soak").absolute()  # where the server's log is
    forgetful = {**serving.of_tests("ForgetfulConnector"), "kv_connector_module_path": "tests.soak.connectors"}
    config = configuration(forgetful, host_memory(2 * HOST_MEMORY), names=[STEERED, "cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {"stuck_after_s": STUCK_AFTER_S, "lookup_timeout_ms": 60_000.0}
    port = with_exporter(config)[1] if has_exporter else None
    with GrpcCollector() as collector:
        env = {
            **collector.env,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.1",
        }
        collector.stop()  # its port is known now
        with serving.serve(
            make_model(folder / "model"), folder, config, "--num-gpu-blocks-override", str(BLOCKS), ranks=2, env=env,
            is_spawned=True,
        ) as plain:  # fmt: skip
            server: Any = Exported(plain, port) if port is not None else plain
            if port is not None:
                server.until_up()
            client, begin = Client(server, seed), time.monotonic()
            _soak(client, collector, requests, result, show)
            _never(client, server)
            result.seconds = time.monotonic() - begin
            result.requests = sum(client.made.values())
            _compare(client, server, result)
    return result


def _soak(client: Client, collector: GrpcCollector, requests: int, result: Result, show: Callable[[str], None]) -> None:
    server, random = client.server, Random(client.seed)
    for n, first in enumerate(range(0, requests, EVERY)):
        last = min(first + EVERY, requests)
        mood = MOODS[n % len(MOODS)]
        _turn(collector, mood)
        result.faults[f"collector {mood}"] += mood != "up"
        begin = time.monotonic()
        client.send((number, draw(random)) for number in range(first, last))
        rate = (last - first) / (time.monotonic() - begin)
        server.reset_prefix_cache()  # only when no block is held for anybody; later repeats are loaded
        for part, name in PARTS.items():
            result.memory.setdefault(part, []).append(Sample(last, serving.resident(server, name)))
        if isinstance(server, Exported):
            result.memory.setdefault("exporter", []).append(Sample(last, server.resident()))
        held = ", ".join(f"{part} {samples[-1].resident >> 20} MiB" for part, samples in result.memory.items())
        show(f"{last:,} of {requests:,} requests, {rate:.0f} a second, collector {mood}: {held}")


def _turn(collector: GrpcCollector, mood: str) -> None:
    """Change the collector's mood, and forget the spans it has: this process is to stay small, too."""
    collector.stop()
    collector.spans.clear()
    collector.hang = mood == "hanging"
    if mood != "down":
        collector.start()


def _never(client: Client, server: Server) -> None:
    """Let a rank be silent about some loads and saves, until they are noticed."""
    client.send(enumerate([order for order in NEVER for _ in range(NEVER_REPORTED)], start=-2 * NEVER_REPORTED))
    stuck = 2 * NEVER_REPORTED
    serving.eventually(lambda: serving.total(server, "kvobs_stuck_transfers_total") >= stuck, 3 * STUCK_AFTER_S)


def _compare(client: Client, server: Server, result: Result) -> None:
    """Compare what the server says with what the client knows, and note what differs."""
    time.sleep(IDLE_S)
    wanted, found = expected(client.made), counted(server)
    for name in wanted.keys() | found.keys():
        if name.startswith(("kvobs_loads_total", "kvobs_saves_total")):
            result.completed += found[name]
            result.lost += max(0, wanted[name] - found[name])
            result.doubled += max(0, found[name] - wanted[name])
    wrong = [f"{k}: {found[k]} instead of {wanted[k]}" for k in wanted.keys() | found.keys() if found[k] != wanted[k]]
    result.series = len(wanted)
    left = sum(n for order, n in client.made.items() if order.hangs_up_after_s is not None)
    result.ends["left by the client"] = left
    result.ends["length"] = ended = int(serving.total(server, "vllm:request_success_total", finished_reason="length"))
    if ended != sum(client.made.values()) - left:
        wrong.append(f"requests that ended: {ended} and {left} of {sum(client.made.values())}")
    ours = serving.total(server, "kvobs_load_bytes_total", connector="cpu")
    theirs = serving.total(server, "vllm:kv_offload_load_bytes_total", connector="cpu")
    if ours != theirs:
        wrong.append(f"bytes loaded by the connector 'cpu': {ours:.0f}, and {theirs:.0f} by its own count")
    result.faults["loads from host memory"] = int(
        serving.total(server, "kvobs_loads_total", connector="cpu", outcome="ok")
    )
    if faults := serving.total(server, "kvobs_internal_errors_total"):
        wrong.append(f"{faults:.0f} faults of kvobs's own")
    for order, n in client.made.items():
        result.faults.update(dict.fromkeys(order.faults, n))
    for place in ("rate", "missed", "queue", "export"):
        result.faults[f"spans lost: {place}"] = int(serving.total(server, "kvobs_spans_dropped_total", where=place))
    result.wrong += wrong


def counted(server: Server) -> Counter[str]:
    """Return what the metrics say of the steered connector, in the words of the orders."""
    found: Counter[str] = Counter()
    for sample in server.metrics():
        if sample.name in COUNTED and sample.labels["connector"] == STEERED and sample.value:
            labels = [v for k, v in sorted(sample.labels.items()) if k not in ("connector", "engine", "model_name")]
            found["/".join([sample.name, *labels])] = int(sample.value)
    return found
