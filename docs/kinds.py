"""List what `kvobs check` finds: tests and docs/check.md are made of this table, and so is a report on many files.

``python -m docs.kinds FOLDER`` checks each file below a folder, and prints by reason how many are fine, have findings,
or are not known here. Exit status 1: a finding has no row here, or a file ended the check.
"""

# ruff: noqa: E501
# A kind is a line.

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from docs.pages import table

K = "--kv-transfer-config"


class Kind(NamedTuple):
    """What the check looks at, the words that it reports, and an input with and without it."""

    looks_at: str
    level: str
    words: str  # a regular expression
    wrong: str
    right: str = ""  # empty: NIXL alone


def one(connector: str, role: str = "kv_both", /, **extra: Any) -> str:
    """Return the JSON of one connector."""
    return json.dumps({"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra})


def router(*connectors: str, **kvobs: Any) -> str:
    """Return the JSON of kvobs's router with these connectors and options."""
    extra = {"connectors": [json.loads(each) for each in connectors], "kvobs": kvobs}
    config = {"kv_connector": "MultiConnector", "kv_connector_module_path": "kvobs", "kv_role": "kv_both"}
    return json.dumps({**config, "kv_connector_extra_config": extra})


def line(config: str, before: str = "", after: str = "") -> str:
    """Return a command with a configuration."""
    return f"{before} vllm serve m {after} {K} '{config}'".strip()


def pod(config: str, more: str = "", image: str = "v") -> str:
    """Return a manifest with a configuration among the arguments of a container."""
    container = f"{{name: v, image: {image}, args: {json.dumps(['m', K, config])}{more}}}"
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {{containers: [{container}]}}\n"


NIXL, EXAMPLE = one("NixlConnector"), one("ExampleConnector")
CPU, SIMPLE = (one(name, cpu_bytes_to_use=1 << 30) for name in ("OffloadingConnector", "SimpleCPUOffloadConnector"))
HOST, ADDRESS = "VLLM_NIXL_SIDE_CHANNEL_HOST", ", env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: 10.0.0.1}]"
PRODUCER, CONSUMER = one("NixlConnector", "kv_producer"), one("NixlConnector", "kv_consumer")
OTHER_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT=5700"
RECOMPUTE = '{"kv_load_failure_policy": "recompute", '
TIERS = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30}


def tiers(**tier: Any) -> str:
    """Return the JSON of an OffloadingConnector with one tier."""
    return one("OffloadingConnector", **TIERS, secondary_tiers=[tier])


MISTAKE, WARNING, UNKNOWN = "mistake", "warning", "not known"
KINDS: dict[str, Kind] = {
    # the text
    "JSON": Kind("the JSON", MISTAKE, r"not valid JSON|is empty|nested too deeply|, needs an object", "{'a': 1}"),
    "YAML": Kind("the YAML", MISTAKE, r"neither JSON nor valid YAML", "kv_connector: [\n"),
    "quote": Kind("a command's quotes", MISTAKE, r"a quote that is not closed", f"vllm serve m {K} '{{"),
    "file": Kind("the file", MISTAKE, r"No such file|is no file with UTF-8|Is a directory|Permission denied", "/no/such/file"),
    "nothing": Kind("whether there is an engine", MISTAKE, r"^CONFIG: the (?:YAML|line) has n", "port: 8000\n"),
    "key twice": Kind("keys", WARNING, r"twice in one", '{"kv_role": "kv_both", ' + NIXL[1:]),
    "option twice": Kind("options of a line", WARNING, r"only the last has an effect", line(NIXL, after=f"{K} '{CPU}'")),
    "number": Kind("vLLM's numbers", MISTAKE, r"is not a whole number", line(NIXL, after="--port x"), line(NIXL)),
    "colon": Kind("arguments in YAML", MISTAKE, r"has a colon behind it", f"args: [m, {{'{K}': '{NIXL}'}}]"),
    "unknown key": Kind("keys of vLLM", MISTAKE, r"unknown key|in the wrong place", '{"kv_rol": 1, ' + NIXL[1:]),
    "key of old": Kind("keys of older vLLMs", MISTAKE, r"this vLLM no longer has$", '{"kv_rank": 1, ' + NIXL[1:]),
    "misplaced": Kind("where a key is", WARNING, r"has no effect here: (?!vLLM only reads the top)|nothing reads this key|in a connector: kvobs", one("NixlConnector", kv_role="kv_both")),
    # the router
    "kvobs is off": Kind("whether kvobs takes part", WARNING, r"kvobs is not enabled|KVOBS_ENABLE has no effect", NIXL, router(NIXL)),
    "lmcacheConfig": Kind("the production stack", MISTAKE, r"vLLM reads the last one", f"lmcacheConfig: {{enabled: true}}\nvllmConfig: {{extraArgs: {json.dumps([K, CPU])}}}\n"),
    "name of the router": Kind("kvobs's name", MISTAKE, r"vLLM would run without a connector|which needs a MultiConnector|found 'kv_obs'", router(NIXL).replace('"kvobs",', '"kv_obs",')),
    "router in a router": Kind("routers within routers", WARNING, r"MultiConnector within|kvobs nested in kvobs", router(one("MultiConnector", connectors=[json.loads(NIXL)]))),
    "roles": Kind("roles in one engine", WARNING, r"found 'kv_\w+', while", router(PRODUCER, CONSUMER), router(PRODUCER, PRODUCER)),
    "same class": Kind("classes under vLLM's router", WARNING, r"found a second", router(CPU, CPU).replace('"kv_connector_module_path": "kvobs", ', ""), router(CPU, CPU)),
    "policy of a connector": Kind("policies", WARNING, r"which has no effect here: vLLM only reads the top level", router(RECOMPUTE + NIXL[1:])),
    # connectors
    "library": Kind("the connector's library", MISTAKE, r"which needs '.*', which is not installed here", one("FlexKVConnectorV1")),
    "class": Kind("the class", MISTAKE, r"this vLLM does not have|not installed here$|is not a KVConnectorBase_V1|kvobs does not have|can't be imported", one("NixlConector")),
    "isolated": Kind("isolated connectors", MISTAKE, r"which can't be isolated", RECOMPUTE + router(NIXL, isolate=["NixlConnector"])[1:], router(CPU)),
    "minimum": Kind("minimum tokens", MISTAKE, r"which can't have one", router(NIXL, min_tokens={"NixlConnector": 9}), router(CPU)),
    "synchronous loads": Kind("synchronous loads", WARNING, r"loads? synchronously|synchronous loads", RECOMPUTE + EXAMPLE[1:], RECOMPUTE + CPU[1:]),
    "layouts": Kind("layouts of the KV cache", MISTAKE, r"need different KV cache layouts", router(one("HiSparseConnector"), one("ExampleHiddenStatesConnector"), names=["a", "b"]), router(CPU)),
    "chunks": Kind("ExampleConnector", WARNING, r"with chunked prefill", line(EXAMPLE), line(EXAMPLE, after="--no-enable-chunked-prefill")),
    "option": Kind("a connector's options", WARNING, r"of vLLM \S+ does not read it", one("NixlConnector", kv_lease_duraton=1), one("NixlConnector", kv_lease_duration=1)),
    "required option": Kind("a connector's options", MISTAKE, r"is missing, and \w+ needs it|cpu_bytes_to_use: is missing", one("OffloadingConnector"), CPU),
    "value of an option": Kind("values of options", MISTAKE, r"unknown (?:value|policy|spec)", one("OffloadingConnector", cpu_bytes_to_use=1 << 30, eviction_policy="fifo"), CPU),
    "type of an option": Kind("types of options", MISTAKE, r"config\.\w+: found a value of type", one("OffloadingConnector", cpu_bytes_to_use="8GB"), CPU),
    "tier": Kind("tiers", MISTAKE, r"secondary_tiers\[\d+\]\.\w+: (?:unknown|is missing)", tiers(type="fs"), tiers(type="fs", root_dir="/kv")),
    "useless option": Kind("options beside each other", WARNING, r"has no effect: (?:kv_offload_backend|only TieringOff)", one("SimpleCPUOffloadConnector", disk_path="/d"), SIMPLE),
    "small": Kind("sizes", WARNING, r"is less than 1 MiB", one("OffloadingConnector", cpu_bytes_to_use=10), CPU),
    "blocking": Kind("calls that block", WARNING, r"blocks the engine as long|waits for the store without", one("LMCacheMPConnector"), one("LMCacheMPConnector", **{"lmcache.mp.mq_timeout": 5})),
    "ignored variable": Kind("the engine's variables", WARNING, r"of vLLM \S+ ignores it", line(one("MoRIIOConnector", http_port=1), "VLLM_MORIIO_NUM_WORKERS=2"), line(one("MoRIIOConnector", http_port=1))),
    # the host
    "memory": Kind("the container's memory", MISTAKE, r"the kernel would end the engine", pod(CPU, ", resources: {limits: {memory: 1Mi}}"), pod(CPU, ", resources: {limits: {memory: 2Gi}}")),
    "shared memory": Kind("/dev/shm", WARNING, r"/dev/shm: found", f"docker run --shm-size 1m v m {K} '{CPU}'", f"docker run --shm-size 2g v m {K} '{CPU}'"),
    "one prompt": Kind("memory for one prompt", WARNING, r"the end of such a prompt evicts its start", ""),  # it needs a model
    "prefix caching": Kind("SimpleCPUOffloadConnector", WARNING, r"does nothing with --no-enable-prefix-caching", line(SIMPLE, after="--no-enable-prefix-caching"), line(SIMPLE)),
    "image": Kind("the image", WARNING, r"which has no kvobs", pod(router(CPU), image="vllm/vllm-openai"), pod(router(CPU))),
    # other engines
    "address": Kind("the address for other engines", WARNING, r"which (?:it|another engine) takes for itself", pod(NIXL), pod(NIXL, ADDRESS)),
    "kinds of a pair": Kind("connectors of one file", WARNING, r"which can't hand KV over to each other", f"{line(PRODUCER)} &\n{line(one('MooncakeConnector', 'kv_consumer'))} &\n", f"{line(PRODUCER)} &\n{line(CONSUMER, OTHER_PORT)} &\n"),
    "roles of a pair": Kind("roles of one file", WARNING, r"engines with \w+ of this file", f"{line(PRODUCER)} &\n{line(PRODUCER, OTHER_PORT)} &\n", f"{line(PRODUCER)} &\n{line(CONSUMER, OTHER_PORT)} &\n"),
    "NIXL's port": Kind("NIXL's ports", WARNING, r"VLLM_NIXL_SIDE_CHANNEL_PORT: found port", f"{line(PRODUCER)} &\n{line(CONSUMER)} &\n", f"{line(PRODUCER)} &\n{line(CONSUMER, OTHER_PORT)} &\n"),
    # where numbers go
    "exporter": Kind("the exporter", WARNING, r"exporter\b.*(?:found (?:port|host|'|\S+ and port)|listens on)|web_config|EXPORTER: (?:found|listens)", line(router(CPU, exporter={"port": 8000})), line(router(CPU, exporter={"port": 9999}))),
    "lost metrics": Kind("metrics", WARNING, r"stat logging is off|several API servers|PROMETHEUS_MULTIPROC_DIR|a Ray actor|RUST_FRONTEND", line(router(CPU, exporter=None), after="--disable-log-stats"), line(router(CPU), after="--disable-log-stats")),
    "traces": Kind("--otlp-traces-endpoint", MISTAKE, r"otlp-traces-endpoint: |tracing\.level|stats, --otlp", line(router(CPU), after="--disable-log-stats --otlp-traces-endpoint http://c"), line(router(CPU), after="--otlp-traces-endpoint http://c")),
    "useless option of kvobs": Kind("options of kvobs", WARNING, r"kvobs\.[\w.]+: (?:has no effect|found .*(?:unusual|refuse here))", router(CPU, load_policy="longest"), router(CPU)),
    "Dynamo": Kind("NVIDIA Dynamo", WARNING, r"dynamo\.vllm: NVIDIA Dynamo", f"python3 -m dynamo.vllm --model m {K} '{router(CPU)}'", line(router(CPU))),
    "offloading size": Kind("--kv-offloading-size", WARNING, r"--kv-offloading-size: ", line(NIXL, after="--kv-offloading-size 4"), line(NIXL)),
    # anything else in the text
    "value": Kind("values of vLLM's keys", MISTAKE, r"kv_\w+: (?:found|is missing)(?!.*(?:class|connector|needs|offers))", one("NixlConnector", "both")),
    "options of kvobs": Kind("options of kvobs", MISTAKE, r"\.kvobs\b.*(?:unknown|found|is not set)(?!.*(?:class|connector|refuse|is in use))", router(NIXL, nmaes=[]), router(NIXL)),
    "connectors": Kind("the list of connectors", MISTAKE, r"config(?:\.connectors(?:\[\d+\])?)?: (?:found|is missing)", router()),
    # what is not known
    "library in an image": Kind("the image", UNKNOWN, r"not installed here\. Fix: check in the image|does not have\. Fix: check in|\. Fix: check in the image", pod(one("LMCacheConnectorV1")), pod(CPU)),
    "class that is not read": Kind("the class's source", UNKNOWN, r"can't be read from the source", router(one("Mine").replace('{"kv', '{"kv_connector_module_path": "json", "kv', 1)), router(CPU)),
    "variable": Kind("values", UNKNOWN, r"whose value is not known here|a value that is not|in parts|which may have --kv", f"vllm serve m {K} \"$KV\"", line(NIXL)),
    "template": Kind("templates", UNKNOWN, r"the file is a template", "args:\n{{- if .Values.x }}\n- a\n{{- end }}\n", line(NIXL)),
    "form": Kind("the command", UNKNOWN, r"in a form that is not known here|a quote that is not closed|the text is no configuration|the line has no|the objects have no engine", f"start.sh \"--log {K} x\"", line(NIXL)),
    "maker": Kind("who makes the configuration", UNKNOWN, r"makes (?:a|the) (?:--kv|configuration)|makes the configuration", "python3 -m dynamo.vllm --connector kvbm", line(NIXL)),
    "other server": Kind("the server", UNKNOWN, r"which is not vLLM", f"sglang serve {K} '{NIXL}'", line(NIXL)),
    "folded": Kind("YAML's > in a shell", MISTAKE, r"the command ends before", f"run: >\n  vllm serve m\n    {K} '{NIXL}'\n", f"run: >\n  vllm serve m\n  {K} '{NIXL}'\n"),
}  # fmt: skip
"""By name; the first whose words a finding has is its kind."""


def texts(given: str) -> Iterator[tuple[str, str, str]]:
    """Yield the level, text and fix of each finding in a text or a file."""
    from typer.testing import CliRunner

    from kvobs.cli import app

    result = CliRunner().invoke(app, ["check", given, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        yield "ended", repr(result.exception), ""
    for answer in map(json.loads, result.stdout.splitlines()):
        for level, name in ((MISTAKE, "mistakes"), (WARNING, "warnings"), (UNKNOWN, "unknown")):
            for each in answer[name]:
                yield level, f"{each['path']}: {each['found']}", each["fix"]


def kind_of(level: str, text: str, fix: str) -> str:
    """Return the name of a finding's kind; empty if it has no row."""
    text = f"{text}. Fix: {fix}" if level == UNKNOWN else text
    is_unknown = level == UNKNOWN
    kinds = (
        name for name, kind in KINDS.items() if (kind.level == UNKNOWN) is is_unknown and re.search(kind.words, text)
    )
    return next(kinds, "")


def kinds_table() -> str:
    """Return the kinds as a table, with what is reported of the wrong example."""
    rows = []
    for name, kind in KINDS.items():
        found = [(text, fix) for level, text, fix in texts(kind.wrong) if kind_of(level, text, fix) == name]
        rows.append([kind.looks_at, kind.level, *(_short(text) for text in (found if kind.wrong else [_PROMPT])[0])])
    return table(["looks at", "level", "reports, for example", "fix"], rows)


_PROMPT = (
    "its 2,400,000,000 bytes of memory have room for 12,207 tokens, but a prompt may have 262,144",
    "give it more",
)


def _short(text: str) -> str:
    """Return a text as a cell, with its first words where it is long."""
    return shorten(text, 150, placeholder=" ...").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Check each file below the folders, and print the reasons; return the exit status."""
    states, reasons, odd = Counter[str](), Counter[tuple[str, str]](), list[str]()
    for path in (path for folder in arguments for path in sorted(Path(folder).rglob("*")) if path.is_file()):
        found = {(each[0], kind_of(*each)): f"{path}: {each[0]}: {each[1]}" for each in texts(str(path))}
        levels = {level for level, _ in found}
        states[next((level for level in ("ended", MISTAKE, UNKNOWN, WARNING) if level in levels), "fine")] += 1
        reasons.update(found.keys())
        odd += [text for (_, kind), text in found.items() if not kind]
    lines = [f"{number:6}  {state}" for state, number in states.most_common()]
    lines += [f"{number:6}  {level}: {kind or 'NO ROW'}" for (level, kind), number in reasons.most_common()]
    print("\n".join([*lines, *odd]))  # noqa: T201 it is a report
    return bool(odd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
