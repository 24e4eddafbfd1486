"""See what vLLM's KV connectors do: a drop-in, instrumenting ``MultiConnector``.

The files are the stations of the flow, in import order (a test keeps it one-way):

    notices     the logger, and saying a thing once
    hooks       every vLLM hook: side, cadence, how children's answers combine
    signals     every metric, once, as data
    faults      kvobs's own faults: contained, counted, logged once
    context     trace contexts, in and out; ids
    spans       every span and attribute, once, as data
    journal     a process's span records until the next flush
    config      the options under ``kv_connector_extra_config.kvobs``
    layout      which blocks hold which tokens, and how many bytes they take
    topology    which decode rank reads which KV heads from which prefill ranks
    blocks      blocks copied between two caches in host memory
    reports     what workers report about loads and saves
    transfers   one load, one promised save, rank by rank
    ledger      who owes what: load owners, promised saves, ranks heard from
    noticed     calls that are more than a number: slow, failed, or wanted
    recorder    the hot path: every call timed and counted
    flush       when numbers travel
    sampling    whether to trace, and what; the sampler's verdict
    call_spans  spans of single calls
    children    the configured connectors: built, named, and their recorded calls
    layer_calls  the hooks of every layer: stamped on the way, counted in bulk
    stalls      how long each step waited for each child
    metadata    what travels between scheduler and workers
    payload     kvobs's numbers on the wire
    summary     a line for each child, for vLLM's log
    stats       what travels to the API server, and its way back into objects
    families    Prometheus families: made once, filled with counts that are bucketed
    tracing     API server: span records -> OpenTelemetry
    metrics     API server: stats payload -> Prometheus, per child
    fanout      the table of hooks, bound to the children
    offers      what the children could load, and the policy that chooses
    request_spans  the spans of lookups, loads and saves
    traces      the requests' traces, joined or begun
    outcomes    how loads and saves ended
    endings     the end of a request, told to every child
    scheduler   the scheduler's side of the routing
    worker      the workers' side of the routing
    connector   ``MultiConnector``, the class that vLLM sees
    plugin      vLLM's entry point
    demo        a real engine on the CPU, a tiny model, two real connectors
    cli         the command ``kvobs``
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["MultiConnector", "__version__", "get_kv_connector_cache_layout"]

if TYPE_CHECKING:
    from kvobs.connector import MultiConnector, get_kv_connector_cache_layout


def __getattr__(name: str) -> Any:
    """Import the connector on first use, so that ``import kvobs`` needs no vLLM."""
    if name in ("MultiConnector", "get_kv_connector_cache_layout"):
        from kvobs import connector

        return getattr(connector, name)
    raise AttributeError(f"module 'kvobs' has no attribute {name!r}")
