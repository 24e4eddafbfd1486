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
    runs        blocks that lie one after the other
    strides     how a layer's blocks lie in memory on both sides
    host_blocks  blocks copied within host memory
    block_plans  which path blocks take to or from a device, in which pieces and chunks
    devices     what the copying needs of a device, and CUDA's streams and events
    staging     blocks through pinned chunks, two in turns
    device_blocks  blocks copied between host memory and a device
    blocks      blocks copied between two KV caches, everything checked before
    reports     what workers report about loads and saves
    transfers   one load, one promised save, rank by rank
    ledger      who owes what: load owners, promised saves, ranks heard from
    ring        the last records of a process, in a block of memory of fixed size
    ring_files  the files that they are in
    flight      the flight recorder: calls, steps, loads and saves as they begin and end
    noticed     calls that are more than a number: slow, failed, or wanted
    recorder    the hot path: every call timed and counted
    flush       when numbers travel
    sampling    whether to trace, and what; the sampler's verdict
    call_spans  spans of single calls
    quarantine  whether a best-effort child may take part
    gates       the way into a best-effort child: what it raises goes no further
    block_copies  the operation that children copy blocks by: counted and timed
    children    the configured connectors: built, named, and their recorded calls
    layer_calls  the hooks of every layer: stamped on the way, counted in bulk
    stalls      how long each step waited for each child
    metadata    what travels between scheduler and workers
    payload     kvobs's numbers on the wire
    summary     a line for each child, for vLLM's log
    stats       what travels to the API server, and its way back into objects
    tallies     which requests all ranks have reported, round by round
    aggregation  the outputs of all workers, combined for the scheduler
    families    Prometheus families: made once, filled with counts that are bucketed
    tracing     API server: span records -> OpenTelemetry
    metrics     API server: stats payload -> Prometheus, per child
    fanout      the table of hooks, bound to the children
    offers      what the children could load, and the policy that chooses
    request_spans  the spans of lookups, loads and saves
    traces      the requests' traces, joined or begun
    isolation   the scheduler's side of the quarantine
    worker_gates  the workers' side of it
    open_transfers  what is open, since when, and which of it is stuck between ranks
    outcomes    how loads and saves ended
    endings     the end of a request, told to every child
    scheduler   the scheduler's side of the routing
    worker      the workers' side of the routing
    connector   ``MultiConnector``, the class that vLLM sees
    plugin      vLLM's entry point
    demo        a real engine on the CPU, a tiny model, two real connectors
    readers     who reads from whom, laid out for people and for scripts
    top         servers' /metrics, live: a row for each child
    recordings  what an engine's processes have recorded, read
    timeline    all of it of an engine, as one Chrome trace
    rewrite     a stock configuration turned into one of kvobs
    findings    mistakes in a configuration: where, what is allowed, what mends them
    child_facts  what the configured classes say about themselves
    check       what a configuration will build, what is off and why, what is wrong
    check_report  the same, laid out for people and for scripts
    check_command  the command ``kvobs check``
    exports     the boards, rules and manifests that come with kvobs, copied to a folder
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
