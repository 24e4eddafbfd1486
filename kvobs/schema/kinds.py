"""List what is found in configurations: each error, each warning, and what `kvobs check` can't know.

The start of an engine and `kvobs check` make their findings from these rows, tests run the two examples of each, and
docs/findings.md lists them.
"""

# ruff: noqa: E501
# A kind is a line.

from __future__ import annotations

import json
from typing import Any

from kvobs.schema.findings import Kind, Level

MISTAKE, WARNING, UNKNOWN = Level
K = "--kv-transfer-config"


def one(connector: str, role: str = "kv_both", /, **extra: Any) -> str:
    """Return the JSON of one connector."""
    return json.dumps({"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra})


def router(*connectors: str, **kvobs: Any) -> str:
    """Return the JSON of kvobs's router with these connectors and options."""
    config = {"kv_connector": "MultiConnector", "kv_connector_module_path": "kvobs", "kv_role": "kv_both"}
    extra = f'{{"connectors": [{", ".join(connectors)}], "kvobs": {json.dumps(kvobs)}}}'
    return f'{json.dumps(config)[:-1]}, "kv_connector_extra_config": {extra}}}'


def line(config: str, before: str = "", after: str = "") -> str:
    """Return a command with a configuration."""
    return f"{before} vllm serve m {after} {K} '{config}'".strip()


def two(first: str, second: str, port: int = 5700) -> str:
    """Return a script that starts two engines."""
    return f"{line(first)} &\n{line(second, f'VLLM_NIXL_SIDE_CHANNEL_PORT={port}')} &\n"


def blocks(first: int, second: int) -> str:
    """Return a script that starts a pair with these sizes of blocks."""
    sizes = (f"--block-size {size}" for size in (first, second))
    here, there = (line(config, after=size) for config, size in zip((PRODUCER, CONSUMER), sizes, strict=True))
    return f"{here} &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 {there} &\n"


def pod(config: str, more: str = "", image: str = "v") -> str:
    """Return a manifest with a configuration among the arguments of a container."""
    container = f"{{name: v, image: {image}, args: {json.dumps(['m', K, config])}{more}}}"
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {{containers: [{container}]}}\n"


def tiers(**tier: Any) -> str:
    """Return the JSON of an OffloadingConnector with one tier."""
    spec = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30}
    return one("OffloadingConnector", **spec, secondary_tiers=[tier])


def cpu(**extra: Any) -> str:
    """Return the JSON of an OffloadingConnector."""
    return one("OffloadingConnector", **{"cpu_bytes_to_use": 1 << 30, **extra})


def beside(config: str, **keys: Any) -> str:
    """Return the JSON with keys added at its top level."""
    return f"{config[:-1]}, {json.dumps(keys)[1:]}"


NIXL, EXAMPLE, CPU = one("NixlConnector"), one("ExampleConnector"), cpu()
SIMPLE = one("SimpleCPUOffloadConnector", cpu_bytes_to_use=1 << 30)
HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PRODUCER, CONSUMER = one("NixlConnector", "kv_producer"), one("NixlConnector", "kv_consumer")
MORIIO = one("MoRIIOConnector", http_port=1)
JOB = "apiVersion: v1\nkind: Job\nmetadata: {name: j}\nspec: {containers: [{name: v, image: v, args: [serve, m]}]}\n"
MODEL = {"num_attention_heads": 8, "hidden_size": 1024, "max_position_embeddings": 262_144, "num_hidden_layers": 48}
"""The file of the model ``model``, which the examples of one kind need."""


# fmt: off
_PASTE = "paste the JSON in its place, or run kvobs check on the expanded value"
_GIVE = "give the JSON of --kv-transfer-config, a vllm serve line, a file with either, YAML with engines, or -"
_LIMIT, _ALLOWED, _UNSET = "raise the limit, or lower cpu_bytes_to_use", "use an allowed value, or remove the option", "use an allowed value, or unset the variable"
_LIST, _GIB = "list the connectors as objects", "such as 10737418240 for 10 GiB"
_POD_IP = "set it to the pod's or container's address: in Kubernetes by a fieldRef to status.podIP"
_OF_LMCACHE = "leave lmcacheConfig.enabled unset, and give vllmConfig.extraArgs a --kv-transfer-config that lists LMCacheConnectorV1 among its connectors"
_CHART = "the chart makes a --kv-transfer-config from lmcacheConfig, with LMCacheConnectorV1 alone, after any other"

# --- the text

FILE = Kind(MISTAKE, "file", "the file", "{file}: {problem}", _GIVE, "/no/such/file")
EMPTY = Kind(MISTAKE, "empty", "the text", "the configuration is empty", _GIVE, "\n")
JSON = Kind(MISTAKE, "json", "the JSON", "the configuration is not valid JSON: {error}; {why}", _GIVE, "{'a': 1}")
DEEP = Kind(MISTAKE, "nesting", "the JSON", "the configuration is nested too deeply", _GIVE, "[" * 20_000)
NO_OBJECT = Kind(MISTAKE, "no-object", "the JSON", "the configuration is of type {type}, not an object with the key 'kv_connector'", _GIVE, "[]")
YAML = Kind(MISTAKE, "yaml", "the YAML", "the configuration is neither JSON nor valid YAML: {error}", _GIVE, "kv_connector: [\n")
NONE_IN_YAML = Kind(MISTAKE, "no-engine", "whether there is an engine", "the YAML has neither a key 'kv-transfer-config' or 'kv_connector' nor a --kv-transfer-config", _GIVE, "port: 8000\n")
NONE_IN_LINE = Kind(MISTAKE, "no-option", "whether there is an engine", "the line has no --kv-transfer-config that can be read; if it has --config, check that file", _GIVE, "vllm serve m --port 8000")
NO_PLACE = Kind(MISTAKE, "place", "--place", "found no engine at {location}", "give one of: {locations}", "", "")
QUOTE = Kind(MISTAKE, "quote", "a command's quotes", "the line has a quote that is not closed", _GIVE, f"vllm serve m {K} '{{")
FOLDED = Kind(MISTAKE, "folded", "YAML's > in a shell", "the command ends before --kv-transfer-config: YAML's '>' keeps the break before a deeper-indented line", "indent its lines alike, or use '|' and end each with '\\'", f"run: >\n  vllm serve m\n    {K} '{NIXL}'\n", f"run: >\n  vllm serve m\n  {K} '{NIXL}'\n")
COLON = Kind(MISTAKE, "colon", "arguments in YAML", "--kv-transfer-config is followed by a colon, which makes it a YAML mapping, but vLLM's arguments are strings; write '--kv-transfer-config=...', or the value as the next argument", _GIVE, f"args: [m, {{'{K}': '{NIXL}'}}]")
NUMBER = Kind(MISTAKE, "number", "vLLM's numbers", "--{name} {value}, next to the configuration, is not {form}", "correct the number", line(NIXL, after="--port x"), line(NIXL))
KEY_TWICE = Kind(WARNING, "key-twice", "keys", "found the key {key!r} twice in one {where}: the first has no effect", "remove one of them", '{"kv_role": "kv_both", ' + NIXL[1:])
OPTION_TWICE = Kind(WARNING, "option-twice", "options of a line", "found {times} of this option: only the last has an effect", "keep one, with all connectors", line(NIXL, after=f"{K} '{CPU}'"))
LMCACHE_CONFIG = Kind(MISTAKE, "lmcache-config", "the production stack", f"{_CHART}: vLLM reads the last one", _OF_LMCACHE, f"lmcacheConfig: {{enabled: true}}\nvllmConfig: {{extraArgs: {json.dumps([K, CPU])}}}\n")

# --- keys of vLLM

UNKNOWN_KEY = Kind(MISTAKE, "unknown-key", "keys of vLLM", "unknown key", "remove it; options of the connector itself belong in its kv_connector_extra_config", beside(NIXL, qqq=1), elsewhere=WARNING)
MISSPELT_KEY = Kind(MISTAKE, "misspelt-key", "keys of vLLM", UNKNOWN_KEY.says, "", beside(NIXL, kv_rol=1))
RETIRED_KEY = Kind(MISTAKE, "retired-key", "keys of older vLLMs", "found a key that this vLLM no longer has", "remove it", beside(NIXL, kv_rank=1), elsewhere=WARNING)
WRONG_PLACE = Kind(MISTAKE, "wrong-place", "where a key is", "is in the wrong place", "move it into kv_connector_extra_config", beside(router(NIXL), connectors=[]), router(NIXL))
OPTION_OUTSIDE = Kind(MISTAKE, "option-outside", "where a key is", "found an option of kvobs in the wrong place", "move it into kv_connector_extra_config.kvobs", beside(router(NIXL), best_effort=[]), router(NIXL))
MISPLACED = Kind(WARNING, "misplaced", "where a key is", "has no effect here: vLLM only reads it one level up", "move it out of kv_connector_extra_config, next to kv_connector", one("NixlConnector", kv_role="kv_both"))
OPTION_BESIDE = Kind(WARNING, "option-beside", "where a key is", "has no effect here: it is an option of kvobs", "move it into kv_connector_extra_config.kvobs", router(NIXL).replace('"kvobs": {}', '"best_effort": []'), router(NIXL))
UNREAD_KEY = Kind(WARNING, "unread-key", "where a key is", "has no effect: nothing reads this key", "use 'kvobs'", router(NIXL).replace('"kvobs": {}', '"kvob": {}'), router(NIXL))
OPTIONS_WITHIN = Kind(WARNING, "options-within", "where a key is", "has no effect in a connector: kvobs only reads its options next to the list of connectors", "move it out, next to kv_connector_extra_config.connectors", router(cpu(kvobs={})), router(CPU))
NO_ROLE = Kind(MISTAKE, "no-role", "kv_role", "{found}", 'add "kv_role": "kv_both", or the role of this engine', '{"kv_connector": "NixlConnector"}')
VALUE = Kind(MISTAKE, "value", "values of vLLM's keys", "{found}", "correct the value or remove it", one("NixlConnector", "both"))
POLICY_BELOW = Kind(WARNING, "policy-below", "policies", "found {found!r}, which has no effect here: vLLM only reads the top level, where it is {policy!r}", "set it at the top level, next to kv_connector", router(beside(NIXL, kv_load_failure_policy="recompute")), router(NIXL))

# --- the router

OFF = Kind(WARNING, "off", "whether kvobs takes part", "kvobs is not enabled{why}", "use the configuration that --rewrite prints{more}", NIXL, router(NIXL))
PLUGINS = Kind(WARNING, "plugins", "VLLM_PLUGINS", "found {plugins!r}, which does not list kvobs: KVOBS_ENABLE has no effect", "add kvobs to the list, or unset the variable", line(NIXL, "KVOBS_ENABLE=1 VLLM_PLUGINS=x"), line(NIXL, "KVOBS_ENABLE=1"))
OTHER_PLUGIN = Kind(WARNING, "other-plugin", "vLLM's plugins", "kvobs is not enabled: a plugin has registered {path} as MultiConnector", "use the configuration that --rewrite prints, without KVOBS_ENABLE", "", "")
ROUTER_NAME = Kind(MISTAKE, "router-name", "kvobs's name", "{found}", "use {right!r}", router(NIXL).replace('"kvobs",', '"kv_obs",'), router(NIXL))
NO_ROUTER = Kind(MISTAKE, "no-router", "kvobs's name", "found {module} next to {name}, which needs a MultiConnector around it", "use the configuration that --rewrite prints; or remove this key, and set KVOBS_ENABLE=1 for vLLM", beside(NIXL, kv_connector_module_path="kvobs"), router(NIXL))
ROUTER_WITHIN = Kind(WARNING, "router-within", "routers within routers", "found vLLM's MultiConnector within MultiConnector: kvobs sees it as one connector, and not the connectors in it", "move its connectors to the list that it is in", router(one("MultiConnector", connectors=[{"kv_connector": "NixlConnector", "kv_role": "kv_both"}])))
KVOBS_WITHIN = Kind(MISTAKE, "kvobs-within", "routers within routers", "found kvobs nested in kvobs", "move its connectors to this list", router(router(NIXL)), router(NIXL))
ROLES = Kind(WARNING, "roles", "roles in one engine", "found {found!r}, while {where} is {role!r}", "use the role that this engine has, unless it is meant to do both", router(PRODUCER, CONSUMER), router(PRODUCER, PRODUCER))
SAME_CLASS = Kind(WARNING, "same-class", "classes under vLLM's router", "found a second {name}: vLLM's own MultiConnector keeps one set of metrics for a class, so the metrics of both are mixed, or the server fails if they differ", "route with kvobs, see --rewrite", router(CPU, CPU).replace('"kv_connector_module_path": "kvobs", ', ""), router(CPU, CPU))
SIZE_WITHIN = Kind(WARNING, "size-within", "--kv-offloading-size", "has no effect next to kvobs's MultiConnector", "remove the flag", line(router(CPU), "KVOBS_ENABLE=1", "--kv-offloading-size 4"), line(router(CPU), "KVOBS_ENABLE=1"))
SIZE_REPLACES = Kind(MISTAKE, "size-replaces", "--kv-offloading-size", "replaces this MultiConnector with {name}, which kvobs's module does not have", "remove the flag: the JSON has the sizes (cpu_bytes_to_use)", line(router(CPU), after="--kv-offloading-size 4"), line(router(CPU)))
SIZE_MAKES = Kind(WARNING, "size-makes", "--kv-offloading-size", "vLLM makes {name} from it, instead of any kv_connector of --kv-transfer-config", "replace the flag by the configuration that --rewrite prints, or start vLLM with KVOBS_ENABLE=1", line(NIXL, after="--kv-offloading-size 4"), line(NIXL))

# --- options of kvobs

NO_CONNECTORS = Kind(MISTAKE, "no-connectors", "the list of connectors", "{found}", _LIST, router(), router(NIXL))
MANY_CONNECTORS = Kind(MISTAKE, "many-connectors", "the list of connectors", "found {number} connectors", "remove the others", router(*['{"kv_connector": "A"}'] * 1001), router(CPU))
NO_CONNECTOR = Kind(MISTAKE, "no-connector", "the list of connectors", "{found}", "name the class of the connector", router('{"kv_role": "kv_both"}'), router(NIXL))
UNKNOWN_OPTION = Kind(MISTAKE, "unknown-option", "options of kvobs", "unknown option", "remove it", router(NIXL, nmaes=[]), router(NIXL))
GONE_OPTION = Kind(MISTAKE, "gone-option", "options of kvobs", "found {found}, but this option is gone", "", router(NIXL, reset_after_failed_sync_load=True), router(NIXL))
OPTION_OF_KVOBS = Kind(MISTAKE, "option-value", "options of kvobs", "found {found}", _ALLOWED, router(NIXL, load_policy="best"), router(NIXL, load_policy="first"))
VARIABLE = Kind(MISTAKE, "variable", "variables of kvobs", "found {found}", _UNSET, line(router(CPU), "KVOBS_EXPORTER=x"), line(router(CPU), "KVOBS_EXPORTER=127.0.0.1:9999"))
NAMES = Kind(MISTAKE, "names", "names of connectors", "found {found}", "choose another name", router(NIXL, names=["?"]), router(NIXL, names=["a"]))
UNKNOWN_NAME = Kind(MISTAKE, "unknown-name", "names of connectors", "unknown connector", "remove it", router(NIXL, link_gbps={"nixl": 1}), router(NIXL, link_gbps={"NixlConnector": 1}))
NO_SHARE = Kind(MISTAKE, "no-share", "verify", "is not set although verify.on_mismatch is 'recompute', so nothing is compared", "set it, or remove on_mismatch", router(CPU, verify={"on_mismatch": "recompute"}), router(CPU))
NEEDS_RECOMPUTE = Kind(MISTAKE, "recompute", "kv_load_failure_policy", "found {found!r}, and {why}", 'set it to "recompute" at the top level, next to kv_connector', router(CPU, best_effort=["OffloadingConnector"]), router(CPU))
BEST_EFFORT = Kind(MISTAKE, "best-effort", "best-effort connectors", "found {name!r} ({cls}), which can't be best-effort: it {why}", "remove it from the list", beside(router(NIXL, best_effort=["NixlConnector"]), kv_load_failure_policy="recompute"), router(CPU))
MINIMUM = Kind(MISTAKE, "minimum", "minimum tokens", "found a minimum for {cls}, which can't have one: it {why}", "remove it", router(NIXL, min_tokens={"NixlConnector": 9}), router(CPU))
UNUSED_OFFERS = Kind(WARNING, "unused-offers", "synchronous loads", "found {name!r}, {hits}, because {harm}", "remove it from the list", beside(router(EXAMPLE, best_effort=["ExampleConnector"]), kv_load_failure_policy="recompute"), router(CPU))
NOT_RECOMPUTED = Kind(WARNING, "not-recomputed", "synchronous loads", "found 'recompute', and {name!r} loads synchronously: {harm}", "", beside(EXAMPLE, kv_load_failure_policy="recompute"), beside(CPU, kv_load_failure_policy="recompute"))
USELESS = Kind(WARNING, "useless", "options of kvobs", "has no effect: {why}", "remove it, or change that", router(CPU, load_policy="longest"), router(CPU))
UNUSUAL = Kind(WARNING, "unusual", "options of kvobs", "found {value:g} {unit}, which is unusual", "check its unit", router(CPU, stuck_after_s=9000), router(CPU))
REQUEST_LOG = Kind(WARNING, "request-log", "options of kvobs", "found {path}, which the engine would refuse here: {problem}", "correct it on the engine's machine, or use another path there", router(CPU, request_log="/no/such/log"), router(CPU, request_log="stderr"))

# --- the class of a connector

LIBRARY = Kind(MISTAKE, "library", "the connector's library", "found {name!r}, which needs {module!r}, which is not installed here", "{install}", one("FlexKVConnectorV1"), elsewhere=UNKNOWN)
CLASS = Kind(MISTAKE, "class", "the class", "found {name}, which this vLLM does not have{reason}", "", one("Mine"), elsewhere=UNKNOWN)
MISSPELT_CLASS = Kind(MISTAKE, "misspelt-class", "the class", CLASS.says, "", one("NixlConector"))
MODULE = Kind(MISTAKE, "module", "the class's module", "found {name}, whose module {module} is not installed here", "correct kv_connector_module_path, or install the package that has the module {package!r}", router(beside(CPU, kv_connector_module_path="no.such")), router(CPU), elsewhere=UNKNOWN)
CLASS_OF_KVOBS = Kind(MISTAKE, "class-of-kvobs", "the class", "found {name}, which kvobs does not have", "use 'MultiConnector'", router(beside(CPU, kv_connector_module_path="kvobs")), router(CPU))
NO_IMPORT = Kind(MISTAKE, "no-import", "the class, with --deep", "found {name}, whose class can't be imported: {error}", "", "", "", elsewhere=UNKNOWN)
NO_CLASS = Kind(MISTAKE, "no-class", "the class, with --deep", "found {name}, which is not a class", "name the class of a KV connector", "", "", elsewhere=UNKNOWN)
NO_KV_CONNECTOR = Kind(MISTAKE, "no-kv-connector", "the class", "found {name}, which is not a KVConnectorBase_V1", "name the class of a KV connector", router(beside(one("JSONDecoder"), kv_connector_module_path="json.decoder")), router(CPU))
RAISES = Kind(MISTAKE, "raises", "the class, with --deep", "its {hook} raises {error}", "correct what the error names", "", "")
NOT_READ = Kind(UNKNOWN, "not-read", "the class's source", "found {name}, whose class can't be read from the source of {module}", "import it: kvobs check --deep", router(beside(one("Mine"), kv_connector_module_path="json")), router(CPU))
LAYOUTS = Kind(MISTAKE, "layouts", "layouts of the KV cache", "the connectors need different KV cache layouts: {listed}", "remove one, or configure them for the same layout", router(one("HiSparseConnector"), one("ExampleHiddenStatesConnector"), names=["a", "b"]), router(CPU))
LAYOUTS_OF_SOME = Kind(WARNING, "layouts-of-some", "layouts of the KV cache", "for models {models} MLA, {found}", LAYOUTS.fix, "", "")
NO_VLLM = Kind(WARNING, "no-vllm", "vLLM, with --deep", "can't be imported here, so that connector classes were not checked: {reason}", "run `python -c 'import vllm'` here, and correct what it names", "", "")

# --- options of a connector

OPTION = Kind(WARNING, "option", "a connector's options", "has no effect: {name} of vLLM {version} does not read it", "remove it", one("NixlConnector", kv_lease_duraton=1), one("NixlConnector", kv_lease_duration=1))
OPTION_MISSING = Kind(MISTAKE, "option-missing", "a connector's options", "is missing, and {name} needs it", "add it", one("MoRIIOConnector"), MORIIO, elsewhere=WARNING)
SIZE_MISSING = Kind(MISTAKE, "size-missing", "a connector's options", "{found}", f'add "cpu_bytes_to_use", {_GIB}', one("OffloadingConnector"), CPU)
SIZE_OF_OLD = Kind(MISTAKE, "size-of-old", "a connector's options", "is missing", f"replace num_cpu_blocks, which older vLLMs had, with cpu_bytes_to_use, {_GIB}", one("OffloadingConnector", num_cpu_blocks=9), CPU, elsewhere=WARNING)
SMALL = Kind(WARNING, "small", "sizes", "is less than 1 MiB, room for no KV block: nothing will be offloaded", f"give bytes, {_GIB}", cpu(cpu_bytes_to_use=10), CPU)
OPTION_TYPE = Kind(MISTAKE, "option-type", "types of options", "found a value of type {type}", "write {form}", cpu(cpu_bytes_to_use="8GB"), CPU)
OPTION_VALUE = Kind(MISTAKE, "unknown-value", "values of options", "unknown {what}", "use one of them", cpu(eviction_policy="fifo"), CPU, elsewhere=WARNING)
SPEC = Kind(MISTAKE, "spec", "values of options", "unknown spec", "set spec_module_path to the module of that class", cpu(spec_name="Mine"), CPU, elsewhere=WARNING)
TIER = Kind(MISTAKE, "tier", "tiers", "unknown tier", "use one of them, or set module_path to the module of that class", tiers(type="filesystem"), tiers(type="fs", root_dir="/kv"), elsewhere=WARNING)
TIER_OPTION_MISSING = Kind(MISTAKE, "tier-option-missing", "tiers", "is missing, and the tier {tier!r} needs it", "add it", tiers(type="fs"), tiers(type="fs", root_dir="/kv"), elsewhere=WARNING)
TIER_OPTION = Kind(MISTAKE, "tier-option", "tiers", "unknown option", "remove it", tiers(type="fs", root_dir="/kv", rot_dir=1), tiers(type="fs", root_dir="/kv"), elsewhere=WARNING)
UNUSED_TIERS = Kind(WARNING, "unused-tiers", "options that exclude each other", "has no effect: only TieringOffloadingSpec has tiers, and spec_name is {spec!r}", 'add "spec_name": "TieringOffloadingSpec"', cpu(secondary_tiers=[{"type": "fs"}]), tiers(type="fs", root_dir="/kv"))
UNUSED_DISK = Kind(WARNING, "unused-disk", "options that exclude each other", "has no effect: kv_offload_backend is 'cpu'", 'add "kv_offload_backend": "disk"', one("SimpleCPUOffloadConnector", disk_path="/d"), SIMPLE)
LONG_CALLS = Kind(WARNING, "long-calls", "calls that block", "is {seconds} s: a server that hangs blocks the engine for that long, even with kvobs.best_effort", "set it to {limit} or less", one("LMCacheMPConnector"), one("LMCacheMPConnector", **{"lmcache.mp.mq_timeout": 5}))
BLOCKING = Kind(WARNING, "blocking", "calls that block", "is false: a lookup waits for the store without a limit, and so does the engine, even with kvobs.best_effort", "set it to true, and limit it by kvobs.lookup_timeout_ms", one("MooncakeStoreConnector"), one("MooncakeStoreConnector", lookup_async=True))
IGNORED_VARIABLE = Kind(WARNING, "ignored-variable", "the engine's variables", "has no effect: {name} of vLLM {version} ignores it", "set {option!r} in kv_connector_extra_config", line(MORIIO, "VLLM_MORIIO_NUM_WORKERS=2"), line(MORIIO))
CHUNKS = Kind(WARNING, "chunks", "ExampleConnector", "found ExampleConnector with chunked prefill: it only saves the first chunk", "add --no-enable-chunked-prefill", line(EXAMPLE), line(EXAMPLE, after="--no-enable-chunked-prefill"))
NO_PREFIXES = Kind(WARNING, "no-prefixes", "SimpleCPUOffloadConnector", "SimpleCPUOffloadConnector does nothing with --no-enable-prefix-caching", "remove that flag, or the connector", line(SIMPLE, after="--no-enable-prefix-caching"), line(SIMPLE))

# --- the host

MEMORY = Kind(MISTAKE, "memory", "the container's memory", "found {limit}, while connectors keep {total:,} bytes in memory: the kernel would kill the engine", _LIMIT, pod(CPU, ", resources: {limits: {memory: 1Mi}}"), pod(CPU, ", resources: {limits: {memory: 2Gi}}"))
SHARED = Kind(MISTAKE, "shared-memory", "/dev/shm", "found {limit}, while OffloadingConnector keeps {shared:,} bytes there: vLLM refuses that", _LIMIT, f"docker run --shm-size 1m v m {K} '{tiers(type='fs', root_dir='/kv')}'", f"docker run --shm-size 2g v m {K} '{CPU}'")
SHARED_PERHAPS = Kind(WARNING, "shared-memory-perhaps", "/dev/shm", f"{SHARED.says} on most GPUs", _LIMIT, f"docker run --shm-size 1m v m {K} '{CPU}'", f"docker run --shm-size 2g v m {K} '{CPU}'")
PROMPT = Kind(WARNING, "prompt", "memory for one prompt", "{text}", "give it more, or lower --max-model-len", line(CPU).replace(" m ", " model "), line(CPU))
IMAGE = Kind(WARNING, "image", "the image", "found {image}, which has no kvobs", "install kvobs's wheel in an image built from this one, or mount kvobs from a volume and set PYTHONPATH to it", pod(router(CPU), image="vllm/vllm-openai"), pod(router(CPU)))

# --- other engines

ADDRESS = Kind(WARNING, "address", "the address for other engines", "found {given}, which {name} sends to other engines: each would connect to itself", _POD_IP, pod(NIXL, f", env: [{{name: {HOST}, value: localhost}}]"), pod(NIXL, f", env: [{{name: {HOST}, value: 10.0.0.1}}]"))
NO_ADDRESS = Kind(WARNING, "no-address", "the address for other engines", "is not set: {name} sends 'localhost' to other engines, and each would connect to itself", _POD_IP, pod(NIXL), pod(NIXL, f", env: [{{name: {HOST}, value: 10.0.0.1}}]"))
PAIR = Kind(WARNING, "pair", "connectors of one file", "found {here} here and {others} in the others of this file, which can't hand KV over to each other", "use one connector in engines of a pair", two(PRODUCER, one("MooncakeConnector", "kv_consumer")), two(PRODUCER, CONSUMER))
PAIR_ROLES = Kind(WARNING, "pair-roles", "roles of one file", "found {role!r} in all {number} engines with {kind} of this file: no engine {lacks} their KV", "give one of them the other role, unless it is in another file", two(PRODUCER, PRODUCER), two(PRODUCER, CONSUMER))
PAIR_BLOCKS = Kind(WARNING, "pair-blocks", "KV blocks of one file", "found {here!r} here and {there!r} for {location}: their KV blocks differ, and {kind} may refuse to load them", "give both engines the same value, unless the connector converts it", blocks(16, 32), blocks(16, 16))
NIXL_PORT = Kind(WARNING, "nixl-port", "NIXL's ports", "found port {port}, which is {whose}", "give each engine of a host another port", two(PRODUCER, CONSUMER, 5600), two(PRODUCER, CONSUMER))

# --- where numbers go

PORT = Kind(WARNING, "port", "the exporter", "found port {port}, which is {whose}", "use another port", line(router(CPU, exporter={"port": 8000})), line(router(CPU, exporter={"port": 9999})))
PORT_IN_USE = Kind(WARNING, "port-in-use", "the exporter", "found port {port}, which is in use on this machine: held by {holder}", "end that process, unless it is the exporter of this server, which is already running; or use another port", "", "")
NO_LISTENING = Kind(WARNING, "no-listening", "the exporter", "found {host} and port {port}, where this machine can't listen: {error}", "use an address of the engine's machine, and a port that its user may open", "", "")
WEB_CONFIG = Kind(WARNING, "web-config", "the exporter", "{error}", "correct the file, unless it is for another machine", router(CPU, exporter={"web_config": "/no/such"}), router(CPU))
OPEN = Kind(WARNING, "open", "the exporter", "listens on {host}: {harm}", "{remedy}", router(CPU, exporter={"host": "0.0.0.0"}), router(CPU, exporter={}))
NOT_SEEN = Kind(WARNING, "not-seen", "the exporter", "found host {host!r}, which no client outside the pod or container reaches", 'add "host": "0.0.0.0", for Prometheus to scrape it', pod(router(CPU, exporter={})), pod(router(CPU)))
LOST = Kind(WARNING, "lost", "metrics", "{why}, and kvobs.exporter is null: metrics and tracing are lost", "remove kv_connector_extra_config.kvobs.exporter; or {instead}", line(router(CPU, exporter=None), after="--disable-log-stats"), line(router(CPU), after="--disable-log-stats"))
TRACES_UNCOUNTED = Kind(MISTAKE, "traces-without-stats", "--otlp-traces-endpoint", "vLLM fails at the first finished request when both are given", "remove one of them", line(router(CPU), after="--disable-log-stats --otlp-traces-endpoint http://c"), line(router(CPU), after="--otlp-traces-endpoint http://c"))
TRACES_OF_RUST = Kind(MISTAKE, "traces-of-rust", "--otlp-traces-endpoint", "VLLM_USE_RUST_FRONTEND is set: that front end refuses it", "set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", line(router(CPU), "VLLM_USE_RUST_FRONTEND=1", "--otlp-traces-endpoint http://c"), line(router(CPU), after="--otlp-traces-endpoint http://c"))
ENDPOINT = Kind(WARNING, "endpoint", "--otlp-traces-endpoint", "has neither a scheme nor a port", "write the collector's address, such as http://localhost:4317", line(router(CPU), after="--otlp-traces-endpoint collector"), line(router(CPU), after="--otlp-traces-endpoint http://c"))
UNTRACED = Kind(WARNING, "untraced", "tracing", "found {level!r}, but nothing is traced: {why}", "start vLLM with --otlp-traces-endpoint, or set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", router(CPU, tracing={"level": "calls"}), router(CPU))
DYNAMO_METRICS = Kind(WARNING, "dynamo-metrics", "NVIDIA Dynamo", "NVIDIA Dynamo serves only metrics that begin with vllm: or lmcache:; kvobs's are at its exporter, {where}", 'set kvobs.exporter to {{"host": "0.0.0.0"}}, and scrape its port', f"python3 -m dynamo.vllm --model m {K} '{router(CPU)}'", line(router(CPU)))
DYNAMO_EVENTS = Kind(WARNING, "dynamo-events", "NVIDIA Dynamo", "NVIDIA Dynamo combines DynamoConnector's KV events with vLLM's only without MultiConnector: its router would see vLLM's events", "keep Dynamo's configuration if requests are routed by these events, or set DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=0", f"python3 -m dynamo.vllm --model m {K} '{router(one('DynamoConnector'))}'", f"python3 -m dynamo.vllm --model m {K} '{router(CPU)}'")

# --- what is not known

TEMPLATE = Kind(UNKNOWN, "template", "templates", "the file is a template, whose values are not known here: give the output of `helm template`", _PASTE, "args:\n{{- if .Values.x }}\n- a\n{{- end }}\n")
HOLES = Kind(UNKNOWN, "holes", "values", "--kv-transfer-config has {names}", _PASTE, f"vllm serve m {K} \"$KV\"")
SIZE_VALUE = Kind(UNKNOWN, "size-value", "values", "--kv-offloading-size has a value that is not known here", _PASTE, "kv-offloading-size: $SIZE\n")
PARTS = Kind(UNKNOWN, "parts", "values", "--{name} sets a part of --kv-transfer-config, which is not read in parts", _PASTE, f"vllm serve m {K}.kv_role kv_both")
SET_ELSEWHERE = Kind(UNKNOWN, "set-elsewhere", "values", "found {found}, which may have --kv-transfer-config", _PASTE, "command: [vllm, serve, m, $EXTRA_ARGS]\n")
FORM = Kind(UNKNOWN, "form", "the command", "--kv-transfer-config is in a form that is not known here; if it has --config, check that file", _PASTE, f"start.sh \"--log {K} x\"")
QUOTE_IN_SCRIPT = Kind(UNKNOWN, "quote-in-script", "the command", "the line has a quote that is not closed", _PASTE, f"cd m\nvllm serve m {K} '{{\n")
DYNAMO_LINE = Kind(UNKNOWN, "dynamo-line", "the command", NONE_IN_LINE.says, _PASTE, "python3 -m dynamo.vllm --model m")
NOTHING = Kind(UNKNOWN, "nothing", "the text", "the text is not a configuration and contains none", _PASTE, "a: b: c\n")
NO_ENGINE_HERE = Kind(UNKNOWN, "no-engine-here", "objects of Kubernetes", "the objects contain no engine with a --kv-transfer-config", _PASTE, JOB)
PYTHON = Kind(UNKNOWN, "python", "who makes the configuration", "a Python program makes the configuration", _PASTE, "import vllm\n")
DYNAMO = Kind(UNKNOWN, "dynamo", "who makes the configuration", "Dynamo makes the configuration from --connector", _PASTE, "python3 -m dynamo.vllm --connector kvbm")
KSERVE = Kind(UNKNOWN, "kserve", "who makes the configuration", "KServe makes the configuration from kvCacheOffloading: OffloadingConnector with its tiers", _PASTE, "kvCacheOffloading: {cpu: 1Gi}\n")
CHART = Kind(UNKNOWN, "chart", "who makes the configuration", "{key!r} is not an option of vLLM: a chart or a program makes the configuration from it", _PASTE, "engine: {nixlEnabled: true}\n")
LMCACHE_CHART = Kind(UNKNOWN, "lmcache-chart", "who makes the configuration", _CHART, _OF_LMCACHE, "lmcacheConfig: {enabled: true}\n")
OTHER_SERVER = Kind(UNKNOWN, "other-server", "the server", "the command starts {server}, which is not vLLM: its options are not known here", _PASTE, f"sglang serve {K} '{NIXL}'")
# fmt: on

KINDS = {each.name: each for each in list(globals().values()) if isinstance(each, Kind)}
"""All kinds by name, in this order."""
