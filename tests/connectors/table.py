"""Every connector class that vLLM 0.32 and 0.33 ship or name, and some that others ship: what was run, and found.

The tables of docs/compatibility.md are made from these.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.connectors.packages import version


class Row(NamedTuple):
    """One connector class."""

    connector: str
    versions: str  # of vLLM
    run: str  # a real server, the real class (and what was stood in for), or not run, and why
    found: str  # with the stock router or by the connector itself, and what kvobs does about it


PROCESS = "real class, both sides, in process"
SERVER = "real server, real engine"

TABLE = (
    Row(
        "OffloadingConnector, CPU spec",
        "0.32, 0.33",
        f"{SERVER} (demo, soak); {PROCESS}: stood in for CUDA's copies",
        "Beside a sibling that loads asynchronously, a save that is still being copied reads blocks that the sibling "
        "fills: Offloading does not learn of blocks allocated for another's load. Same with kvobs.",
    ),
    Row(
        "OffloadingConnector, tiering spec",
        "0.32, 0.33",
        f"{PROCESS}: stood in for CUDA's copies; the tier is a tier of our own",
        "As the CPU spec.",
    ),
    Row(
        "LMCacheMPConnector",
        "0.32, 0.33",
        f"{SERVER} (make test-connectors); {PROCESS} (lmcache {version('lmcache')}): stood in for its message queue",
        "An abort during a sibling's load ends stock's engine, not kvobs's. Read locks of a request that is aborted "
        "before its blocks are allocated stay until their TTL, by LMCache itself.",
    ),
    Row(
        "LMCacheConnectorV1",
        "0.32, 0.33",
        f"{PROCESS} (lmcache {version('lmcache')}): stood in for its cache engine and its lookup client",
        "On the V1 runner a request that resumes with a sibling's hit ends the engine: an assertion of LMCache's. "
        "Same with kvobs.",
    ),
    Row(
        "MooncakeStoreConnector",
        "0.32, 0.33",
        f"{SERVER} (make test-connectors); {PROCESS}, lookups that wait and that do not: stood in for the store's "
        "handle, threads and sockets",
        "After a failed asynchronous load vLLM's scheduler reserves the request's blocks twice: where the cache is "
        "smaller than that, it waits for ever. vLLM's own, under any connector.",
    ),
    Row(
        "SimpleCPUOffloadConnector, eager and lazy",
        "0.32, 0.33",
        f"{PROCESS}: stood in for CUDA's streams, events and copies",
        "A save that was ordered and never begun counts as done when a later one is.",
    ),
    Row(
        "FlexKVConnectorV1",
        "0.32, 0.33",
        "real class; its library is not on PyPI and stood in for, after its adapter",
        "It overwrites what siblings before it have reported: with stock their requests wait for ever, with kvobs not.",
    ),
    Row(
        "HF3FSKVConnector",
        "0.32, 0.33",
        f"{PROCESS}: stood in for the metadata client, CUDA and threads",
        "After a preemption it stores wrong KV: its block list is appended to on the V1 runner, and running saves "
        "are not waited for. Same with kvobs.",
    ),
    Row(
        "NixlConnector (NixlPullConnector)",
        "0.32, 0.33",
        f"{SERVER}: prefill and decode engines; real scheduler side in process, a pair, stood in for the workers' wire",
        "Nothing.",
    ),
    Row(
        "NixlPushConnector",
        "0.32, 0.33",
        "real scheduler side in process, a pair, stood in for the workers' wire",
        "Nothing.",
    ),
    Row(
        "MooncakeConnector",
        "0.32, 0.33",
        f"{SERVER} (make test-connectors); real scheduler side in process, a pair, stood in for the workers' wire",
        "Nothing.",
    ),
    Row(
        "DecodeBenchConnector",
        "0.32, 0.33",
        f"{PROCESS}: nothing stood in for",
        "Its KV is made up, on purpose: siblings save it.",
    ),
    Row(
        "ExampleConnector",
        "0.32, 0.33",
        f"{PROCESS}: nothing stood in for",
        "Takes a prompt for computed when its first chunk is: run without chunked prefill.",
    ),
    Row("MultiConnector, nested", "0.32, 0.33", f"{PROCESS}: Offloading and SimpleCPUOffload inside", "Nothing."),
    Row(
        "MoRIIOConnector",
        "0.32, 0.33",
        "real scheduler side as producer, read and write mode, in process; stood in for its worker, which is AMD's "
        "library, and its clock; beside a scripted sibling. Its consumer's side was read, not run",
        "It withdraws finished_sending of its siblings' requests: stock never frees their blocks. An early "
        "acknowledgement, or one that never comes, makes stock free blocks that a sibling still saves. With kvobs "
        "neither.",
    ),
    Row(
        "HiSparseConnector",
        "0.32, 0.33",
        "real scheduler side, in process, with its coordinator and vLLM's KV cache managers for it, on the KV cache "
        "groups of a sparse-attention model; stood in for its worker (CUDA); beside a scripted sibling and NIXL's "
        "scheduler side",
        "It is given the end of every load of its siblings, with kvobs as with stock. Must not be isolated: its half "
        "in vLLM's cache manager goes on without it.",
    ),
    Row(
        "ExampleHiddenStatesConnector",
        "0.32, 0.33",
        "real scheduler side, its workers' lock files and reports, in process; stood in for the speculative model and "
        "the copy on a CUDA stream; beside a scripted sibling",
        "One rank reports. With two ranks stock waits for the other for ever; kvobs does not.",
    ),
    Row("UMBPStoreConnector", "0.33", "read, not run: shipped, but not registered; its runtime is AMD's", "Nothing."),
)


class ThirdParty(NamedTuple):
    """One connector that vLLM does not ship."""

    connector: str
    version: str  # of its package on PyPI
    when: str  # by make, once by hand, or not
    run: str
    found: str


CI = "each `make test-connectors`"
BY_HAND = "once by hand, 24 Nov 2026"

RUN_WITH = (
    ThirdParty(
        "Redhare",
        version("redhare"),
        CI,
        "Served, with Debian's redis, which is killed in the middle; stood in for CUDA's events. kvobs counts what "
        "Redhare counts",
        "Nothing. Without redis it goes on everywhere, with what its worker holds.",
    ),
    ThirdParty(
        "SpoolCache",
        version("spoolcache"),
        CI,
        "Served; its folder cannot be written, then not be read; stood in for CUDA's memory, and for an answer of vLLM "
        "0.32 that it does not expect. kvobs counts what SpoolCache counts. By hand with two ranks, too",
        "It refuses its siblings' stats, which ends stock's engine at the first step; kvobs shows it its own. When it "
        "cannot read what it has offered it ends its worker, on purpose, alone and with kvobs.",
    ),
    ThirdParty(
        "OpenLake",
        "0.8.1",
        BY_HAND,
        "In one process and served, with its daemon, which was killed; 20 random lives in process, with preemptions",
        "Served, it ends stock's engine at the first stats, because its class is not registered; not so with kvobs. "
        "It copies wrong bytes on vLLM's layout LBHNC, alone too.",
    ),
    ThirdParty(
        "vllm-kvblockd",
        "0.1.0",
        BY_HAND,
        "In one process; lookups that wait and that do not, loads that fail; stood in for its daemon, not on PyPI",
        "It loads synchronously: isolated beside a sibling that saves, its hits are not used.",
    ),
    ThirdParty("Lifeboat, a tier of OffloadingConnector", "0.1.11", BY_HAND, "In one process", "Nothing."),
    ThirdParty(
        "SemBlend",
        "0.2.8",
        BY_HAND,
        "In one process, without vLLM's prefix cache; it served equal prompts only, not similar ones",
        "Nothing.",
    ),
    ThirdParty(
        "PegaFlow, NoopKVConnector",
        "0.25.1",
        BY_HAND,
        "In one process, alone and in kvobs; it keeps nothing",
        "Its NixlConnector cannot be imported with vLLM 0.32; `kvobs check` says so.",
    ),
    ThirdParty(
        "tierkv",
        "0.1.0",
        BY_HAND,
        "20 random lives in process, in stock and in kvobs, calls and held blocks compared; a dictionary stood in for "
        "its vault",
        "It offers whole prompts, which ends the engine with stock and with kvobs: vLLM asserts that a token is left.",
    ),
    ThirdParty(
        "SparkCache",
        "0.1.0a2",
        "not, CUDA only",
        "Read",
        "In stock it looks for its reports in the stats of all connectors and never has a hit, without an error.",
    ),
    ThirdParty(
        "vllm-marconi-offload",
        "0.2.2",
        BY_HAND,
        "Its start",
        "It does not start with vLLM 0.32, alone neither. kvobs's error names it.",
    ),
)
