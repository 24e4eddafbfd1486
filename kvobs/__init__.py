"""See what vLLM's KV connectors do: a drop-in, instrumenting ``MultiConnector``.

What vLLM loads is at the root, as are the tables that all else reads; each package is one part of the flow. Imports go
from the bottom of this list to its top, never back (``tests/unit/test_imports.py``):

    hooks, signals, spans, config, deviations   the tables: vLLM's hooks, metrics, spans, options, differences
    host                    what differs between the versions of vLLM
    findings                mistakes and warnings about a configuration
    faults, log, version    faults of kvobs's own, contained; the logger; the version
    topology                which decode rank reads which KV heads from which prefill ranks
    blocks/                 blocks of the KV cache copied, in host memory and to and from a device
    state/                  pure state machines: who loads and saves what, rank by rank; quarantine; cache layout
    telemetry/              in EngineCore and workers: calls timed and counted, span records, flight recorder
    stats/                  the payload that carries the numbers to the API server
    children/               the configured connectors: built, gated, their calls recorded
    aggregation             vLLM's aggregation of the workers' outputs, rank by rank
    exporting/              in vLLM's processes: payload to Prometheus metrics and OpenTelemetry spans, or the exporter
    exporter/               a process beside the engine, without vLLM: the same metrics and spans
    routing/                the scheduler's and the workers' side: who loads, who saves, isolation
    connector, plugin       ``MultiConnector``, the class that vLLM loads; vLLM's entry point
    demo/                   a real engine on a CPU with two connectors
    cli/                    the command ``kvobs``
    testing/                vLLM's scheduler around a connector without a model, for tests of connectors
"""

from typing import TYPE_CHECKING, Any

from kvobs.version import __version__

__all__ = ["MultiConnector", "__version__", "get_kv_connector_cache_layout"]

if TYPE_CHECKING:
    from kvobs.connector import MultiConnector, get_kv_connector_cache_layout


def __getattr__(name: str) -> Any:
    """Import the connector on first use, so that ``import kvobs`` needs no vLLM."""
    if name in ("MultiConnector", "get_kv_connector_cache_layout"):
        from kvobs import connector

        return getattr(connector, name)
    raise AttributeError(f"module 'kvobs' has no attribute {name!r}")
