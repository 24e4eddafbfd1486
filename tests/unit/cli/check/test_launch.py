"""What `kvobs check` finds in lines, scripts, manifests and charts as people have them, and nothing else."""

# ruff: noqa: E501
# A case is a line.
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.demo.run import ON_A_GPU
from kvobs.export.listening import LESS_OPEN

pytestmark = pytest.mark.usefixtures("bare_machine")

BOTH = '"kv_role": "kv_both"'
NIXL = f'{{"kv_connector": "NixlConnector", {BOTH}}}'
CPU = (
    f'{{"kv_connector": "OffloadingConnector", {BOTH}, "kv_connector_extra_config": {{"cpu_bytes_to_use": 10000000}}}}'
)
EXAMPLE = f'{{"kv_connector": "ExampleConnector", {BOTH}}}'


def router(*connectors: str, kvobs: str = "", module: str = ', "kv_connector_module_path": "kvobs"') -> str:
    options = f', "kvobs": {kvobs}' if kvobs else ""
    extra = f'{{"connectors": [{", ".join(connectors)}]{options}}}'
    return f'{{"kv_connector": "MultiConnector"{module}, {BOTH}, "kv_connector_extra_config": {extra}}}'


def with_key(connector: str, value: str) -> str:
    return f'{{"kv_connector": "{connector}", {BOTH}, "kv_connector_extra_config": {value}}}'


ALONE = router(EXAMPLE, kvobs='{"best_effort": ["ExampleConnector"]}').replace(
    BOTH, f'"kv_load_failure_policy": "recompute", {BOTH}', 1
)
RECOMPUTED = ALONE.replace(', "kvobs": {"best_effort": ["ExampleConnector"]}', "")
OURS, STOCK = router(CPU, NIXL), router(CPU, NIXL, module="")
KEYED = CPU.replace(BOTH, f'{BOTH}, "kv_connector_module_path": "kvobs"')
BY_PATH = router(
    CPU, module=', "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"'
)
LINE = f"--kv-transfer-config '{OURS}'"
OFF, STOCK_OFF = "kv_connector: kvobs is not enabled", "kv_connector_module_path: kvobs is not enabled"
UNLISTED = "VLLM_PLUGINS: found 'lora', which does not list kvobs"
MISSING = "kv_connector: is missing: vLLM would run without a connector"
SERVERS = "--api-server-count: several API servers"
AT_PORT = "kvobs.exporter: found port 9464, which is --port"
DYNAMO = "dynamo.vllm: NVIDIA Dynamo serves only metrics that begin with vllm: or lmcache:"
UNSET = "VLLM_NIXL_SIDE_CHANNEL_HOST: is not set"
EVENTS = "dynamo.vllm: NVIDIA Dynamo combines DynamoConnector's KV events with vLLM's only without MultiConnector"
KVBM = ', "kv_connector_module_path": "kvbm.vllm_integration.connector"'
PD = router(f'{{"kv_connector": "DynamoConnector"{KVBM}, {BOTH}}}', NIXL, module=KVBM).replace("Multi", "Pd", 1)
PD_OFF = "kv_connector: kvobs is not enabled: PdConnector routes"
NO_KVBM = "install the package that has the module 'kvbm'"
EXPORTER, NONE, LAST, OPEN, LOOPBACK, SENT = (
    f'{{"exporter": {options}}}'
    for options in ("{}", "null", '{"port": 65530}', '{"host": "0.0.0.0"}', '{"host": "127.0.0.2"}',
                    '{"port": null, "otlp_metrics": true}')
)  # fmt: skip
SEEN, UNSEEN = router(CPU, NIXL, kvobs=OPEN), router(CPU, NIXL, kvobs=EXPORTER)
NIXL_TWICE = "found port 5600, which is VLLM_NIXL_SIDE_CHANNEL_PORT of NixlConnector of command 1"
SHELL = "exec vllm serve m --kv-transfer-config '{}'".format


def args(*words: str) -> str:
    return json.dumps(["m", *words])


def pod(container: str) -> str:
    """Return a Deployment whose container has these keys, in YAML's flow style."""
    kind = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: vllm}\n"
    host = "env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]"
    return f"{kind}spec: {{template: {{spec: {{{host}, containers: [{{name: vllm, image: v, {container}}}]}}}}}}\n"


def shared(size: str, connector: str) -> str:
    """Return a pod with a connector and this much shared memory."""
    mount = "volumeMounts: [{name: shm, mountPath: /dev/shm}]"
    volumes = f"volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {size}}}}}]"
    return pod(f"args: {args(K, connector)}, {mount}").replace("containers:", f"{volumes}, containers:")


TIERS = CPU.replace('{"cpu', '{"spec_name": "TieringOffloadingSpec", "cpu')
K = "--kv-transfer-config"
# Text, number of engines, words of each finding.
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "plugins": (f"VLLM_PLUGINS=lora KVOBS_ENABLE=1 vllm serve m {K} '{STOCK}'", 1, (UNLISTED,)),
    "plugins with kvobs": (f"VLLM_PLUGINS=lora,kvobs KVOBS_ENABLE=1 vllm serve m {K} '{STOCK}'", 1, ()),
    "plugins and the key": (f"VLLM_PLUGINS=lora vllm serve m {LINE}", 1, ()),
    "on the line": (f"KVOBS_ENABLE=1 vllm serve m {K} '{STOCK}'", 1, ()),
    "shell variable that is set": (f"KV='{OURS}'\nvllm serve m {K} \"$KV\"", 1, ()),
    "no option": ("vllm serve m --port 8000", 1, ("the line has no --kv-transfer-config that can be read; if it has --config",)),
    "offloading size": ("vllm serve m --kv-offloading-size 10", 1, ("--kv-offloading-size: vLLM makes OffloadingConnector from it", OFF)),
    "two": (f"vllm serve m {LINE} {K} '{NIXL}'", 1, ("--kv-transfer-config: found 2 of this option", OFF)),
    "port": (f"vllm serve m --port 9464 {K} '{router(CPU, kvobs=EXPORTER)}'", 1, (AT_PORT,)),
    "one port for all ranks": (f"vllm serve m -dp 4 --port 9466 {K} '{router(CPU, kvobs=EXPORTER)}'", 1, ()),
    "last port": (router(CPU, kvobs=LAST), 1, ()),
    "log in no folder": (router(CPU, kvobs='{"request_log": "/no/log"}'), 1, ("/no is missing",)),
    "log is a folder": (router(CPU, kvobs='{"request_log": "/tmp"}'), 1, ("it is a folder",)),
    "log to stderr": (router(CPU, kvobs='{"request_log": "stderr"}'), 1, ()),
    "longest of one": (router(CPU, kvobs='{"load_policy": "longest"}'), 1, ("kvobs.load_policy: has no effect",)),
    "earlier of one": (router(CPU, kvobs='{"wait_for": "earlier"}'), 1, ("kvobs.wait_for: has no effect",)),
    "slow, none isolated": (router(CPU, kvobs='{"best_effort_slow_ms": 5}'), 1, ("best_effort_slow_ms: has no effect",)),
    "propagate": (router(CPU, kvobs='{"tracing": {"propagate": true}}'), 1, ("propagate: has no effect",)),
    "kvobs in a connector": (router(with_key("NixlConnector", '{"kvobs": {}}')), 1, ("kvobs: has no effect in a",)),
    "kvobs misspelt": (OURS.replace('"connectors"', '"Kvob": {}, "best_effort": [], "x": 1, "connectors"'), 1, ("Kvob: has no effect: nothing reads", "best_effort: has no effect here: it is an option of kvobs")),
    "chunks": (f"vllm serve m {K} '{router(EXAMPLE, CPU)}'", 1, ("found ExampleConnector with chunked prefill",)),
    "vllm's defaults": (f"vllm serve m --no-enable-chunked-prefill {K} '{ALONE}'", 1, ("kvobs.best_effort: found 'ExampleConnector', which only offers synchronous loads: its hits are ignored, because vLLM's V2 model runner",)),
    "steps in flight": (f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m --no-enable-chunked-prefill {K} '{ALONE}'", 1, ("kvobs.best_effort: found 'ExampleConnector', which only offers synchronous loads: its hits are ignored, because with several steps",)),
    "a step at a time": (f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m --no-enable-chunked-prefill --no-async-scheduling {K} '{ALONE}'", 1, ()),
    "a step in each stage": (f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m -pp 2 --no-enable-chunked-prefill --no-async-scheduling {K} '{ALONE}'", 1, ("because with several steps",)),
    "synchronous loads": (RECOMPUTED, 1, ("kv_load_failure_policy: found 'recompute', and 'ExampleConnector' loads synchronously: vLLM's V2 model runner",)),
    "synchronous loads that are recomputed": (f"VLLM_USE_V2_MODEL_RUNNER=false vllm serve m --no-enable-chunked-prefill --no-async-scheduling {K} '{RECOMPUTED}'", 1, ()),
    "synchronous loads that fail": (RECOMPUTED.replace("recompute", "fail"), 1, ()),
    "no chunks": (f"vllm serve m --no-enable-chunked-prefill {K} '{router(EXAMPLE)}'", 1, ()),
    "the demo's": (f"vllm serve MODEL {K} '{json.dumps(ON_A_GPU)}'", 1, ()),
    "opposite roles": (router(CPU.replace("both", "producer"), NIXL.replace("both", "consumer")), 1, ("found 'kv_consumer', while that of connectors[0] is 'kv_producer'",)),
    "key twice": (OURS.replace(BOTH, f'"kv_role": "kv_producer", {BOTH}', 1), 1, ("the key 'kv_role' twice",)),
    "lmcache mp": (router(with_key("LMCacheMPConnector", "{}")), 1, ("mq_timeout: is 300 s", "'lmcache'")),
    "lmcache mp, short": (router(with_key("LMCacheMPConnector", '{"lmcache.mp.mq_timeout": 5}')), 1, ("'lmcache'",)),
    "mooncake store": (router(with_key("MooncakeStoreConnector", "{}")), 1, ("lookup_async: is false", "'mooncake.")),
    "mooncake store, async": (router(with_key("MooncakeStoreConnector", '{"lookup_async": true}')), 1, ("'mooncake.",)),
    # data parallelism
    "servers by -dp": (f"vllm serve m -dp 4 {K} '{router(CPU, kvobs=NONE)}'", 1, (SERVERS,)),
    "one by -asc": (f"vllm serve m -dp 4 -asc 1 {K} '{router(CPU, kvobs=NONE)}'", 1, ()),
    "of another program": (f"python3 -m vllm.entrypoints.openai.api_server -dp 4 {K} '{router(CPU, kvobs=NONE)}'", 1, ()),
    # ports of others
    "nixl's": (router(NIXL, kvobs='{"exporter": {"port": 5600}}'), 1, ("5600, which is VLLM_NIXL_SIDE",)),
    "nixl's of a rank": (f"VLLM_NIXL_SIDE_CHANNEL_PORT=9463 vllm serve m -dp 2 {K} '{router(NIXL, kvobs=EXPORTER)}'", 1, ("9464, which is VLLM_NIXL",)),
    "coordinator's": (f"vllm serve m -dp 2 -dpp 9464 {K} '{router(CPU, kvobs=EXPORTER)}'", 1, ("9464, which is --data-parallel-rpc",)),
    "of a second engine": (f"vllm serve m {K} '{router(CPU, kvobs=EXPORTER)}' &\n" * 2, 2, ("9464, which is the exporter's of command 1",)),
    "in containers": (f"docker run v {K} '{router(CPU, kvobs=EXPORTER)}'\n" * 2, 2, ()),
    "on the host's network": (f"docker run --net=host v {K} '{router(CPU, kvobs=EXPORTER)}'\n" * 2, 2, ("exporter's of command 1",)),
    "compose, on the host": ("services:\n" + "".join(f"  {name}: {{network_mode: host, command: {args(K, router(CPU, kvobs=EXPORTER))}}}\n" for name in "ab"), 2, ("exporter's of services.a",)),
    # the router's name
    "no kv_connector": (OURS.replace('"kv_connector": "MultiConnector", ', ""), 1, (MISSING,)),
    "misspelt kv_connector": (OURS.replace("kv_connector", "kv_conector", 1), 1, (MISSING, "kv_conector: unknown key")),
    # what a text does not say
    "default": (f"vllm serve m {K} ${{KV:-'{OURS}'}}", 1, ()),
    "port's default": (f"vllm serve m --port ${{PORT:-9464}} {K} '{router(CPU, kvobs=EXPORTER)}'", 1, (AT_PORT,)),
    "set twice over": (f"ROLE=kv_both\nKV='{NIXL.replace('kv_both', '$ROLE')}'\nvllm serve m {K} \"$KV\"", 1, (OFF,)),
    "default of itself": (f"PORT=${{PORT:-9464}}\nvllm serve m --port $PORT {K} '{router(CPU, kvobs=EXPORTER)}'", 1, (AT_PORT,)),
    "a branch": (f"if [ $1 ]; then KV='{NIXL}'; else KV='{CPU}'; fi\nvllm serve m {K} \"${{KV:-{{}}}}\"", 1, ("has ${KV:-{}, whose",)),
    "a case": (f"KV='{NIXL}'\ncase $1 in\n a) KV='{CPU}';;\nesac\nvllm serve m {K} $KV", 1, ("has $KV, whose",)),
    "a test": (f"KV='{NIXL}'\n[[ $A && $B ]] && KV='{CPU}'\nvllm serve m {K} $KV", 1, ("has $KV, whose",)),
    "appended": (f"KV='{NIXL[:-1]}'\nKV+='}}'\nvllm serve m {K} $KV", 1, ("has $KV, whose",)),
    "many unknown": (f"vllm serve m {K} $A$B$C$D$E", 1, ("has $A, $B, $C and 2 more, whose",)),
    "flow mapping": ('env: {KV: "{kv_connector: NixlConnector, kv_role: kv_both}"}\n', 1, (OFF,)),
    "computed": (f"KV=$(cat kv.json)\nvllm serve m {K} \"${{KV}}\"", 1, ("--kv-transfer-config has $(cat kv.json), whose value is not known here, paste the JSON",)),
    "rewritten on the line": (f'vllm serve m {K} "$(kvobs check --rewrite stock.json)"', 1, ("has $(kvobs check --rewrite stock.json), whose value",)),
    "in parts": (f"vllm serve m {LINE} {K}.kv_role kv_both", 1, ("kv_role sets a part of --kv-transfer-config, which is not read in parts",)),
    "in a word": (f'python3 serve.py "--log {K} x"', 1, ("--kv-transfer-config is in a form that is not known here", )),
    "a variable of the engine": (f"KVOBS_EXPORTER=$POD_IP:9464 vllm serve m {LINE}", 1, ()),
    "in a subshell": (f"(cd /x && vllm serve m {LINE}) &", 1, ()),
    "compose, default": (f"command: {args(K, CPU.replace('10000000', '${N:-10000000}'))}\n", 1, (OFF,)),
    "this project's": ((Path(__file__).parents[4] / "docker-compose.yml").read_text(), 1, (LESS_OPEN,)),
    "a part": (f"vllm serve m {K} '{NIXL[:-1]}, \"engine_id\": \"$HOSTNAME\"}}'", 1, (OFF, "has $HOSTNAME, whose value is not known here",)),
    "here-document": (f"cat <<-'EOF'\n\tDon't\n\tEOF\nvllm serve m {LINE}", 1, ()),
    "manifest in a here-document": (f"kubectl apply -f - <<EOF\nargs:\n- {K}\n- '{CPU}'\nEOF\n", 1, ("--kv-transfer-config is in a form that is not known here",)),
    "hash in a word": (f"# don't\nvllm serve m#1 {LINE} # don't", 1, ()),
    "one of two": (f"{pod(f'args: {args(K, OURS)}')}---\n{pod(f'args: {args(K, OURS[:-1])}')}", 2, ("CONFIG: the configuration is not valid JSON",)),
    "file in a configmap": (f"data:\n  a.sh: vllm serve m {K} $(cat kv.json)\n  kv.json: '{OURS}'\n", 2, ("has $(cat kv.json), whose value",)),
    # scripts
    "export": (f"export KVOBS_ENABLE=1\nvllm serve m {K} '{STOCK}'", 1, ()),
    "not exported": (f"KVOBS_ENABLE=1\nvllm serve m {K} '{STOCK}'", 1, (STOCK_OFF,)),
    "of the other one": (f"KVOBS_ENABLE=1 vllm serve m {LINE} &\nvllm serve m {K} '{STOCK}' &\n", 2, (STOCK_OFF, NIXL_TWICE)),
    "ports for each": (f"vllm serve m {LINE} &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {LINE} &\n", 2, ()),
    "one with a flag": ("KVOBS_ENABLE=1 vllm serve m --kv-offloading-size 10", 1, ()),
    "rust front end": (f"VLLM_USE_RUST_FRONTEND=1 vllm serve m --otlp-traces-endpoint http://c:4317 {K} '{OURS}'", 1, ("that front end refuses it",)),
    "dynamo's port": (f"DYN_SYSTEM_PORT=9464 python -m dynamo.vllm --model m {K} '{SEEN}'", 1, ("which is DYN_SYSTEM_PORT", "listens on '0.0.0.0'")),
    "a colon": (pod(f"args: [m, {{'{K}': '{OURS}'}}]"), 1, ("is followed by a colon",)),
    "exporter in a pod": (pod(f"args: {args(K, UNSEEN)}"), 1, ("no client outside the pod or container reaches",)),
    "exporter in a pod, seen": (pod(f"args: {args(K, SEEN)}"), 1, ("listens on '0.0.0.0'",)),
    "memory": (pod(f"resources: {{limits: {{memory: 9.5Mi}}}}, args: {args(K, CPU)}"), 1, ("found 9.5Mi, while connectors keep 10,000,000 bytes", OFF)),
    "memory that is enough": (pod(f"resources: {{limits: {{memory: 10M}}}}, args: {args(K, OURS)}"), 1, ()),
    "shared memory": (shared("9Mi", CPU), 1, ("/dev/shm: found 9Mi, while OffloadingConnector keeps 10,000,000 bytes there: vLLM refuses that on most GPUs", OFF)),
    "shared memory that is enough": (shared("10Mi", TIERS), 1, (OFF,)),
    "shared memory, nearly enough": (shared("9Mi", TIERS), 1, ("refuses that on most GPUs", OFF)),
    "shared memory of tiers": (shared("4Mi", TIERS), 1, ("there: vLLM refuses that, raise the limit", OFF)),
    "shared memory in compose": (f"services: {{a: {{image: v, shm_size: 4mb, command: {args(K, TIERS)}}}}}\n", 1, ("found 4mi", OFF)),
    "shared memory of docker": (f"docker run --gpus all --shm-size=4m v {K} '{TIERS}'", 1, ("found 4mi", OFF)),
    "exporter in a service": (f"services:\n  vllm:\n    image: v\n    network_mode: host\n    command: {args(K, UNSEEN)}\n", 1, ()),
    "units": (router(CPU, NIXL, kvobs='{"stuck_after_s": 60000, "slow_load_ms": 1}'), 1, ("60000 seconds", "1 milliseconds")),
    "env": (f"exec env KVOBS_ENABLE=1 python3 -m vllm.entrypoints.openai.api_server --model m {K}='{STOCK}'", 1, ()),
    "docker": (f"docker run --gpus all -e KVOBS_ENABLE=1 -p 8000:8000 vllm/vllm-openai --model m {K} '{STOCK}'", 1, ("image: found 'vllm/vllm-openai', which has no kvobs", UNSET,)),
    "arguments in a variable": (f"ARGS='--port 1 {K} x'\nvllm serve m $ARGS", 1, ("--kv-transfer-config is in a form that is not known here",)),
    "number in a variable": (f"vllm serve m --port $PORT -tp ${{TP}} {LINE}", 1, ()),
    "offloading size beside": (f"vllm serve m --kv-offloading-size 4 {K} '{NIXL}'", 1, ("instead of any", OFF)),
    "offloading size beside no role": (f"vllm serve m --kv-offloading-size 4 {K} '{{\"kv_connector\": \"NixlConnector\"}}'", 1, ("kv_role", "instead of any", OFF)),
    "offloading size beside kvobs": (f"vllm serve m --kv-offloading-size 4 {LINE}", 1, ("--kv-offloading-size: replaces this MultiConnector with OffloadingConnector, which kvobs's module does not have, remove the flag: the JSON has the sizes",)),
    "offloading size without effect": (f"KVOBS_ENABLE=1 vllm serve m --kv-offloading-size 4 {LINE}", 1, ("--kv-offloading-size: has no effect next to kvobs's MultiConnector, remove the flag",)),
    "offloading size, stock and enabled": (f"KVOBS_ENABLE=1 vllm serve m --kv-offloading-size 4 {K} '{STOCK}'", 1, ("instead of any kv_connector of --kv-transfer-config, remove the flag, or that kv_connector",)),
    "the key on a single connector": (KEYED, 1, ("kv_connector_module_path: found 'kvobs' next to 'OffloadingConnector', which needs a MultiConnector around it, use the configuration that --rewrite prints; or remove this key, and set KVOBS_ENABLE=1 for vLLM",)),
    "the key on a single connector, enabled": (f"KVOBS_ENABLE=1 vllm serve m {K} '{KEYED}'", 1, ("which needs a MultiConnector around it, use the configuration that --rewrite prints; or remove this key",)),
    "the key on a misspelt router": (OURS.replace("MultiConnector", "MutliConnector"), 1, ("kv_connector: found 'MutliConnector', use 'MultiConnector'",)),
    "stock by its path": (f"KVOBS_ENABLE=1 vllm serve m {K} '{BY_PATH}'", 1, ("kv_connector_module_path: kvobs is not enabled: vLLM's own MultiConnector routes, use the configuration that --rewrite prints",)),
    "stock image": (pod(f"args: {args(K, OURS)}").replace("image: v", "image: 'vllm/vllm-openai:v0.32.0'"), 1, ("image: found 'vllm/vllm-openai:v0.32.0', which has no kvobs, install kvobs's wheel in an image built from this one, or mount kvobs from a volume and set PYTHONPATH to it",)),
    "stock image, enabled": (f"services: {{a: {{image: docker.io/vllm/vllm-openai, environment: [KVOBS_ENABLE=1], command: {args(K, STOCK)}}}}}\n", 1, ("image: found 'docker.io/vllm/vllm-openai', which has no kvobs", UNSET,)),
    "stock image with a volume": (pod(f"env: [{{name: PYTHONPATH, value: /packages}}], args: {args(K, OURS)}").replace("image: v", "image: vllm/vllm-openai"), 1, ()),
    "stock image without kvobs": (f"services: {{a: {{image: vllm/vllm-openai, command: {args(K, STOCK)}}}}}\n", 1, (STOCK_OFF, UNSET,)),
    "stock image of the chart": (f"modelSpec:\n- repository: lmcache/vllm-openai\n  tag: v1\n  vllmConfig: {{extraArgs: {args(K, OURS)}}}\n", 1, ("image: found 'lmcache/vllm-openai:v1', which has no kvobs",)),
    "image of one's own": (pod(f"args: {args(K, OURS)}").replace("image: v", "image: registry.example.com/vllm/vllm-openai:v1"), 1, ()),
    "offloading to lmcache": ("vllm serve m --kv-offloading-size 4 --kv-offloading-backend lmcache", 1, ("vLLM makes LMCacheMPConnector", "mq_timeout: is 300 s", "'lmcache'", OFF)),
    "systemd": (f"[Unit]\nDescription=vLLM\n[Service]\nEnvironment=\"KVOBS_ENABLE=1\" A=2\nExecStart=/opt/vllm serve m \\\n " f" {K} '{STOCK}'\nRestart=always\n", 1, ()),
    "log stats": (f"vllm serve m --disable-log-stats {K} '{router(CPU, kvobs=NONE)}'", 1, ("--disable-log-stats: vLLM's stat logging is off",)),
    "no number": (f"vllm serve m --port four {LINE}", 1, ('--port "four", next to the configuration, is not a whole number',)),
    "size with a unit": ("vllm serve m --kv-offloading-size 10GB", 1, ('--kv-offloading-size "10GB", next to the configuration, is not a number of GiB above 0',)),
    "size of 0": ("vllm serve m --kv-offloading-size=0", 1, ('--kv-offloading-size "0", next to the configuration, is not a number of GiB above 0',)),
    "size without a value": ("vllm serve m --kv-offloading-size", 1, ("--kv-offloading-size true, next to the configuration, is not a number of GiB above 0",)),
    "no engine here": (f"vllm serve m -dp 4 -dpl 0 --api-server-count=0 {LINE}", 1, ()),
    "dockerfile": (f"FROM v\nENV KVOBS_ENABLE=1\nCMD {args(K, STOCK)}\n", 1, ("--kv-transfer-config is in a form that is not known here",)),
    "endpoint that is a number": (f"otlp_traces_endpoint: 4317\nkv_transfer_config: {OURS}\n", 1, ("--otlp-traces-endpoint: has neither a scheme nor a port",)),
    "applied by kubectl": (pod(f"args: {args(K, OURS)}") + f"status: {{annotations: {{last: {json.dumps(LINE)}}}, runtime_env: text}}\n", 1, ()),
    "for another shell": ("srun bash -c " + json.dumps(SHELL(STOCK)).replace("$", "") + " &\n", 1, (STOCK_OFF,)),
    # YAML
    "vllm.yaml, several servers": (f"api_server_count: 2\nkv_transfer_config: {router(CPU, kvobs=NONE)}\n", 1, ("--api-server-count: several API servers",)),
    "vllm.yaml": (f"model: m\nport: 9464\nkv_transfer_config: {router(CPU, kvobs=EXPORTER)}\n", 1, (AT_PORT,)),
    "vllm.yaml, none": ("model: m\nport: 9464\n", 1, ("the YAML has neither a key 'kv-transfer-config'",)),
    "deployment, variable": (pod(f"env: [{{name: KVOBS_ENABLE, value: '1'}}, {{name: A, valueFrom: {{}}}}], " f"args: {args(f'{K}={STOCK}')}"), 1, ()),
    "deployment, $(KV)": (pod(f"env: [{{name: KV, value: {json.dumps(OURS)}}}], args: {args(K, '$(KV)')}"), 1, ()),
    "no chunks in YAML": (f"enable_chunked_prefill: false\nkv_transfer_config: {router(EXAMPLE)}\n", 1, ()),
    "key twice in YAML": (f"port: 1\nport: 2\nkv_transfer_config: {OURS}\n", 1, ("YAML: found the key 'port' twice in one mapping",)),
    "sh -c, args": (pod(f"command: [bash, -c], args: [{json.dumps(SHELL(STOCK))}]"), 1, (STOCK_OFF,)),
    "configmap": (f"kind: ConfigMap\nmetadata: {{name: c}}\ndata:\n  vllm.yaml: |\n    model: m\n    kv-transfer-config: '{OURS}'\n", 1, ()),
    "kustomize patch": (f"patches:\n- target: {{kind: Deployment}}\n  patch: |-\n    - {{op: test, path: /a, value: {K}}}\n    - op: replace\n      path: /b\n      value: >-\n        {NIXL}\n", 1, (OFF,)),
    "compose": (f"services:\n  vllm:\n    image: v\n    environment: [KVOBS_ENABLE=1]\n    command: >\n" f"      --model m {K} '{STOCK}'\n", 1, (UNSET,)),
    "production stack": (f"servingEngineSpec:\n  modelSpec:\n  - vllmConfig: {{extraArgs: {args(K, OURS)}}}\n", 1, ()),
    "its LMCache": ("modelSpec:\n- lmcacheConfig: {enabled: true}\n  vllmConfig: {}\n", 1, ("from lmcacheConfig, with LMCacheConnectorV1 alone, after any other, leave lmcacheConfig.enabled unset, and",)),
    "its LMCache beside kvobs": (f"modelSpec:\n- lmcacheConfig: {{enabled: true}}\n  vllmConfig: {{extraArgs: {args(K, OURS)}}}\n", 2, ("after any other: vLLM reads the last one, leave lmcacheConfig.enabled unset",)),
    "its metrics": (f"vllmConfig: {{extraArgs: {args(K, router(CPU, kvobs=NONE))}}}\n", 1, ("PROMETHEUS_MULTIPROC_DIR: the API server only exposes",)),
    "extraEnvVars": (f"extraEnvVars: [{{name: KVOBS_ENABLE, value: '1'}}]\nextraArgs: {args(K, STOCK)}\n", 1, ()),
    "modelservice": (f"prefill:\n  containers: [{{args: {args(K, OURS)}}}]\ndecode:\n  containers: [{{args: {args(K, NIXL)}}}]\n", 2, (OFF,)),
    "llm-d service": (f"spec:\n  template:\n    containers:\n    - env: [{{name: VLLM_ADDITIONAL_ARGS, value: {json.dumps(LINE)}}}]\n", 1, ()),
    "template": (f"spec:\n  args:\n  - {K}\n  - {{{{ .Values.kv | toJson }}}}\n", 1, ("the file is a template",)),
    "broken manifest": (f"spec:\n  args: [{K}, '\n", 1, ("neither JSON nor valid YAML",)),
    "ray serve, no exporter": (f"llm_configs:\n- engine_kwargs:\n    kv_transfer_config: {router(CPU, kvobs=NONE)}\n", 1, ("Ray Serve: a Ray actor only exposes metrics",)),
    "ray serve, variable": (f"llm_configs:\n- runtime_env: {{env_vars: {{KVOBS_ENABLE: '1'}}}}\n  engine_kwargs: " f"{{kv_transfer_config: {STOCK}}}\n", 1, ()),
    # NVIDIA Dynamo
    "dynamo": (f"python3 -m dynamo.vllm --model m {LINE}", 1, (DYNAMO,)),
    "dynamo, reachable": (f"python3 -m dynamo.vllm --model m {K} '{router(CPU, kvobs=OPEN)}'", 1, (LESS_OPEN,)),
    "dynamo, pd": (f"DYN_KVBM_CPU_CACHE_GB=9 python3 -m dynamo.vllm --model m {K} '{PD}'", 1, (DYNAMO, EVENTS, PD_OFF, NO_KVBM)),
    "dynamo, pd, no events": (f"DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=off python3 -m dynamo.vllm {K} '{PD}'", 1, (DYNAMO, PD_OFF, NO_KVBM)),
    "dynamo, loopback": (f"python3 -m dynamo.vllm {K} '{router(CPU, kvobs=LOOPBACK)}'", 1, (f"{DYNAMO}; kvobs's are at its exporter, at 127.0.0.2",)),
    "dynamo, by OTLP": (f"python3 -m dynamo.vllm {K} '{router(CPU, kvobs=SENT)}'", 1, ()),
    "kvbm without dynamo": (f"DYN_KVBM_CPU_CACHE_GB=9 vllm serve m {K} '{PD}'", 1, (PD_OFF, NO_KVBM)),
    "dynamo's manifest": (f"kind: DynamoGraphDeployment\nspec: {{services: {{Decode: {{extraPodSpec: {{mainContainer: {{" f"command: [python3, -m, dynamo.vllm], args: {args(K, OURS)}}}}}}}}}}}\n", 1, (DYNAMO,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_launch_has_these_findings_and_no_others(kind: str, tmp_path: Path) -> None:
    text, engines, findings = CASES[kind]
    path = tmp_path / "given"
    path.write_text(text)
    before = dict(os.environ)
    result = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert dict(os.environ) == before
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == any(answer["errors"] for answer in answers)
    assert len(answers) == engines, result.output
    told = [
        f"{finding['path']}: {finding['found']}, {finding['fix']}"
        for answer in answers
        for finding in (*answer["warnings"], *answer["errors"], *answer["unknown"])
    ]
    assert len(told) == len(findings), told
    assert all(any(words in text for text in told) for words in findings), told


@pytest.mark.parametrize("kind", ["offloading size", "one with a flag"])
def test_no_advice_to_set_a_variable_that_is_set(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def advice(text: str) -> str:
        return CliRunner().invoke(app, ["check", text]).stdout

    text = CASES[kind][0].removeprefix("KVOBS_ENABLE=1 ")
    assert advice(text).count("or start vLLM with KVOBS_ENABLE=1") == 2
    monkeypatch.setenv("KVOBS_ENABLE", "1")
    assert "KVOBS_ENABLE=1" not in advice(text)


def test_rewrite_wraps_what_the_key_stands_beside() -> None:
    keyed, bare = (CliRunner().invoke(app, ["check", text, "--rewrite"]) for text in (KEYED, CPU))
    assert (keyed.exit_code, keyed.stderr) == (0, bare.stderr)
    assert json.loads(keyed.stdout) == json.loads(bare.stdout)
    assert json.loads(keyed.stdout)["kv_connector_extra_config"]["connectors"] == [json.loads(CPU)]


def test_rewrite_takes_dynamos_router_and_a_scripts_engines() -> None:
    result = CliRunner().invoke(app, ["check", PD, "--rewrite"])
    pair = json.loads(PD)["kv_connector_extra_config"]["connectors"]
    config = json.loads(result.stdout)
    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("MultiConnector", "kvobs")
    assert config["kv_connector_extra_config"]["connectors"] == pair
    several = CliRunner().invoke(app, ["check", f"vllm serve m {LINE}\nvllm serve m {LINE}", "--rewrite"])
    assert json.loads(several.stdout) == dict.fromkeys(("command 1", "command 2"), json.loads(OURS))
