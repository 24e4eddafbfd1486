"""The minimal inputs of a review of 445 public files with connectors: each has the findings that its author needs."""

# ruff: noqa: E501
# A case is a line.
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import app

pytestmark = pytest.mark.usefixtures("bare_machine")

K = "--kv-transfer-config"


def one(connector: str, extra: str = "", role: str = "kv_both") -> str:
    own = f', "kv_connector_extra_config": {extra}' if extra else ""
    return f'{{"kv_connector": "{connector}", "kv_role": "{role}"{own}}}'


def pod(config: str, container: str = "", image: str = "image: v,", kind: str = "Deployment") -> str:
    head = f"apiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: vllm}}\n"
    args = json.dumps(["m", K, config])
    return f"{head}spec: {{template: {{spec: {{containers: [{{name: vllm, {image} args: {args}{container}}}]}}}}}}\n"


def pair(first: str, second: str, role: str = "kv_consumer") -> str:
    here = f"vllm serve m {first} {K} '{one('NixlConnector', role='kv_producer')}' &"
    return f"{here}\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {second} {K} '{one('NixlConnector', role=role)}' &\n"


NIXL, LMCACHE, ASCEND = (
    one("NixlConnector"),
    one("LMCacheMPConnector", '{"lmcache.mp.mq_timeout": 5}'),
    one("MooncakeConnectorV1"),
)

P2P = one(
    "OffloadingConnector",
    '{"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000, "secondary_tiers": [{"type": "p2p"}]}',
)
TWO = one("MultiConnector", '{"connectors": [$NIXL, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]}')
IN_A_SHELL = f"containers:\n- image: v\n  command: [sh, -c, 'exec vllm serve m {K} \"$KV\"']\n  env: [{{name: KV, value: {json.dumps(one('ExampleConnector'))}}}]\n"
TIER = '{{"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000, "secondary_tiers": [{{{}}}]}}'
HTTP = '{"http_port": 1}'
PER_RANK = one("SimpleCPUOffloadConnector", '{"cpu_bytes_to_use_per_rank": 10000000}')
MOONCAKE = one("MooncakeConnector", role="kv_consumer")

# Text, exit status, words of findings in their order: mistakes, warnings, unknown; ! is before what is not there.
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "library in an image": (pod(LMCACHE), 0, ("unknown: kv_connector: found 'LMCacheMPConnector', which needs 'lmcache', which is not installed here. Fix: check in the image, or here: install it: pip install lmcache.", "!error:")),
    "library, docker": (f"docker run vllm/vllm-openai m {K} '{LMCACHE}'", 0, ("unknown: kv_connector: found",)),
    "library, on this machine": (f"vllm serve m {K} '{LMCACHE}'", 1, ("error: kv_connector: found 'LMCacheMPConnector', which needs 'lmcache'",)),
    "plugin in an image": (pod(ASCEND), 0, ("unknown: kv_connector: found 'MooncakeConnectorV1', which this vLLM does not have. Fix: check in the image, or here: install vllm-ascend",)),
    "plugin, on this machine": (f"vllm serve m {K} '{ASCEND}'", 1, ("error: kv_connector: found 'MooncakeConnectorV1'",)),
    "module in an image": (pod(one("X").replace("{", '{"kv_connector_module_path": "x.y", ', 1)), 0, ("unknown: kv_connector: found 'X', whose module 'x.y' is not installed here",)),
    "misspelt name in an image": (pod(one("NixlConector")), 1, ("error: kv_connector: found 'NixlConector'", "Fix: use 'NixlConnector'", "!unknown:")),
    "compose with build": (f"services: {{a: {{build: ., command: {json.dumps([K, LMCACHE])}}}}}", 0, ("unknown: kv_connector",)),
    "several in an image": (pod(f'{{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {{"connectors": [{LMCACHE}, {one("MoRIIOConnector")}]}}}}'), 0, ("connectors[0].kv_connector: found", "connectors[1].kv_connector: found", "2 not known here")),
    # peers
    "no host": (pod(NIXL), 0, ("warning: environment variable VLLM_NIXL_SIDE_CHANNEL_HOST: is not set: NixlConnector sends 'localhost' to other engines, and each would connect to itself. Fix: set it to the pod's or container's address: in Kubernetes by a fieldRef to status.podIP.",)),
    "host of this pod": (pod(NIXL, ", env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: 0.0.0.0}]"), 0, ("warning: environment variable VLLM_NIXL_SIDE_CHANNEL_HOST: found '0.0.0.0', which NixlConnector sends to other engines",)),
    "host of the pod": (pod(NIXL, ", env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]"), 0, ("!SIDE_CHANNEL",)),
    "host from elsewhere": (pod(NIXL, ", envFrom: [{configMapRef: {name: nixl}}]"), 0, ("!SIDE_CHANNEL",)),
    "no network": (pod(NIXL).replace("containers:", "hostNetwork: true, containers:"), 0, ("!SIDE_CHANNEL",)),
    "host by its maker": (pod(NIXL, kind="LLMInferenceService"), 0, ("!SIDE_CHANNEL",)),
    "host by dynamo": (pod(NIXL, ", command: [python3, -m, dynamo.vllm]"), 0, ("!SIDE_CHANNEL",)),
    "no host, compose": ("services: {a: {image: v, environment: [OTHER], command: " + json.dumps(["m", K, NIXL]) + "}}\n", 0, ("VLLM_NIXL_SIDE_CHANNEL_HOST: is not set",)),
    "host that compose passes on": ("services: {a: {image: v, environment: [VLLM_NIXL_SIDE_CHANNEL_HOST], command: " + json.dumps(["m", K, NIXL]) + "}}\n", 0, ("!SIDE_CHANNEL",)),
    "no host, docker": (f"docker run vllm/vllm-openai m {K} '{NIXL}'", 0, ("VLLM_NIXL_SIDE_CHANNEL_HOST: is not set",)),
    "host, docker": (f"docker run -e VLLM_NIXL_SIDE_CHANNEL_HOST=10.1.2.3 vllm/vllm-openai m {K} '{NIXL}'", 0, ("!SIDE_CHANNEL",)),
    "docker on the host's network": (f"docker run --network host vllm/vllm-openai m {K} '{NIXL}'", 0, ("!SIDE_CHANNEL",)),
    "no host, on this machine": (f"vllm serve m {K} '{NIXL}'", 0, ("!SIDE_CHANNEL",)),
    "no host of the tier": (pod(P2P), 0, ("VLLM_P2P_SIDE_CHANNEL_HOST: is not set", "!NIXL_SIDE")),
    "host of the tier": (pod(P2P.replace('"p2p"', '"p2p", "host": "10.1.2.3"')), 0, ("!SIDE_CHANNEL",)),
    "two kinds": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nvllm serve m --port 1 {K} '{MOONCAKE}' &\n", 1, ("warning: kv_connector: found NixlBaseConnector here and MooncakeConnector in the others of this file, which can't hand KV over to each other",)),
    "two producers": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\n", 0, ("warning: kv_role: found 'kv_producer' in all 2 engines with NixlBaseConnector of this file: no engine takes their KV",)),
    "two consumers": (f"vllm serve m {K} '{one('NixlConnector', role='kv_consumer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlConnector', role='kv_consumer')}' &\n", 0, ("no engine computes their KV",)),
    "a pair": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlPullConnector', role='kv_consumer')}' &\n", 0, ("!in the others", "!in all")),
    "push and pull": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlPushConnector', role='kv_consumer')}' &\n", 0, ("warning: kv_connector: found NixlBaseConnector here and NixlPushConnector in the others",)),
    "both push": (f"vllm serve m {K} '{one('NixlPushConnector', role='kv_producer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlPushConnector', role='kv_consumer')}' &\n", 0, ("!in the others",)),
    "two sizes of blocks": (pair("--block-size 16", "--block-size 32"), 0, ("warning: --block-size: found '16' here and '32' for command 2: their KV blocks differ, and NixlBaseConnector may refuse to load them.", "2 engines: no errors, 3 warnings")),
    "two data types": (pair("", "--kv-cache-dtype fp8"), 0, ("warning: --kv-cache-dtype: found 'auto' here and 'fp8' for command 2", "!--dtype")),
    "two layouts": ("export VLLM_KV_CACHE_LAYOUT=HND\n" + pair("", "").replace("VLLM_NIXL", "VLLM_KV_CACHE_LAYOUT=NHD VLLM_NIXL"), 0, ("warning: environment variable VLLM_KV_CACHE_LAYOUT: found 'HND' here and 'NHD' for command 2",)),
    "one size of blocks that is the platform's": (pair("--block-size 16", ""), 0, ("!KV blocks differ",)),
    "a size that is not known": (pair("--block-size 16", "--block-size $SIZE"), 0, ("!KV blocks differ",)),
    "sizes of two models": (pair("--block-size 16", "--block-size 32").replace("serve m", "serve n", 1), 0, ("!KV blocks differ",)),
    "sizes of two producers": (pair("--block-size 16", "--block-size 32", "kv_producer"), 0, ("!KV blocks differ",)),
    "sizes of two that do both": (pair("--block-size 16", "--block-size 32").replace("kv_producer", "kv_both").replace("kv_consumer", "kv_both"), 0, ("warning: --block-size: found '16' here",)),
    "sizes of stores": (pair("--block-size 16", "--block-size 32").replace("NixlConnector", "ExampleConnector"), 0, ("!KV blocks differ",)),
    "two that do both": (f"vllm serve m {K} '{NIXL}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{NIXL}' &\n", 0, ("!in the others", "!in all")),
    # options
    "misspelt": (one("NixlConnector", '{"kv_lease_duraton": 300}'), 0, ("warning: kv_connector_extra_config.kv_lease_duraton: has no effect: NixlConnector of vLLM 0.32.0 does not read it, allowed: 'backends', ", "Fix: use 'kv_lease_duration'.")),
    "of a sibling": (one("NixlConnector", '{"load_async": true, "enable_cross_layers_blocks": true}'), 0, ("load_async: has no effect", "enable_cross_layers_blocks: has no effect", "no errors, 3 warnings")),
    "of a config file": (one("MooncakeStoreConnector", '{"lookup_async": true, "enable_offload": true, "preferred_segment": "a"}'), 1, ("enable_offload: has no effect", "!preferred_segment:")),
    "all that it reads": (one("NixlConnector", '{"backends": ["UCX"], "kv_lease_duration": 30, "num_threads": 4, "kv_recompute_threshold": 64}'), 0, ("no errors, 1 warning",)),
    "missing": (one("MoRIIOConnector", '{"proxy_ip": "10.0.0.1", "proxy_ping_port": 1}'), 1, ("error: kv_connector_extra_config.http_port: is missing, and MoRIIOConnector needs it. Fix: add it.", "!notify_port:")),
    "no such value": (one("MoRIIOConnector", '{"http_port": 1, "backend": "tcp"}'), 1, ("error: kv_connector_extra_config.backend: unknown value, allowed: 'rdma', 'xgmi'",)),
    "a value": (one("MoRIIOConnector", '{"http_port": 1, "backend": "RDMA"}'), 1, ("!backend:",)),
    "size of 0": (one("OffloadingConnector", '{"cpu_bytes_to_use": 0}'), 1, ("error: kv_connector_extra_config.cpu_bytes_to_use: found 0, allowed: a whole number above 0. Fix: give bytes, such as 10737418240 for 10 GiB.",)),
    "misspelt size": (one("OffloadingConnector", '{"cpu_byte_to_use": 10000000}'), 1, ("cpu_bytes_to_use: is missing. Fix: rename 'cpu_byte_to_use', which has no effect.",)),
    "no such policy": (one("OffloadingConnector", '{"cpu_bytes_to_use": 10000000, "eviction_policy": "fifo"}'), 1, ("eviction_policy: unknown policy, allowed: 'arc', 'lru'",)),
    "a policy from elsewhere": (one("OffloadingConnector", '{"cpu_bytes_to_use": 10000000, "eviction_policy": "fifo", "cache_policy_module_path": "x"}'), 0, ("no errors, 1 warning",)),
    "in an image": (pod(one("OffloadingConnector", '{"cpu_bytes_to_use": 10000000, "eviction_policy": "fifo"}')), 0, ("warning: kv_connector_extra_config.eviction_policy: unknown policy",)),
    "variable that is ignored": (f"VLLM_MORIIO_QP_PER_TRANSFER=4 vllm serve m {K} '{one('MoRIIOConnector', HTTP)}'", 1, ("warning: environment variable VLLM_MORIIO_QP_PER_TRANSFER: has no effect: MoRIIOConnector of vLLM 0.32.0 ignores it. Fix: set 'qp_per_transfer' in kv_connector_extra_config.",)),
    "tier without a folder": (one("OffloadingConnector", TIER.format('"type": "fs"')), 1, ("error: kv_connector_extra_config.secondary_tiers[0].root_dir: is missing, and the tier 'fs' needs it",)),
    "tier, misspelt": (one("OffloadingConnector", TIER.format('"type": "fs", "root_dir": "/a", "n_read_thread": 1')), 1, ("secondary_tiers[0].n_read_thread: unknown option", "use 'n_read_threads'")),
    "tier": (one("OffloadingConnector", TIER.format('"type": "fs", "root_dir": "/a", "n_read_threads": 1, "locality": "LOCAL"')), 0, ("no errors, 1 warning",)),
    "tier that takes all": (one("OffloadingConnector", TIER.format('"type": "p2p", "host": "h", "later": 1')), 0, ("no errors, 1 warning",)),
    "not shown by its source": (one("LMCacheConnectorV1", '{"lmcache.x": 1, "y": 2}'), 1, ("!has no effect",)),
    "of an older vLLM, in an image": (pod('{"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", "kv_buffer_size": "1e1"}'), 0, ("unknown: kv_connector: found 'P2pNcclConnector'", "warning: kv_buffer_size: found a key that this vLLM no longer has")),
    # makers
    "kserve": ("apiVersion: serving.kserve.io/v1alpha1\nkind: LLMInferenceService\nmetadata: {name: a}\nspec: {workload: {kvCacheOffloading: {cpu: 40Gi}}}\n", 0, ("unknown: CONFIG: KServe makes the configuration from kvCacheOffloading",)),
    "compose, an argument elsewhere": ("services: {a: {image: vllm/vllm-openai, command: '--model m ${KV_TRANSFER_ARG:-}'}}\n", 0, ("unknown: CONFIG: found ${KV_TRANSFER_ARG, which may have --kv-transfer-config",)),
    "dynamo's own": ("python3 -m dynamo.vllm --model m --connector kvbm nixl", 0, ("unknown: CONFIG: Dynamo makes the configuration from --connector",)),
    "a chart's key": ("replicas: 2\nengine: {kvTransfer: {enabled: true, backend: nixl}}\n", 0, ("unknown: CONFIG: 'kvTransfer' is not an option of vLLM: a chart or a program makes",)),
    # values
    "two levels": ("PORT=6555\nKV=\"{\\\"kv_connector\\\":\\\"ExampleConnector\\\",\\\"kv_role\\\":\\\"kv_both\\\",\\\"kv_port\\\":${PORT}}\"\nvllm serve m --kv-transfer-config \"$KV\"", 0, ("!not known", "no errors")),
    "innermost": (f"KV='{one('$CLASS')}'\nvllm serve m {K} \"$KV\"", 0, ("unknown: CONFIG: --kv-transfer-config has $CLASS, whose", "!$KV", "!error:")),
    "the rest": (f"vllm serve m {K} '{{\"kv_connector\": \"OffloadingConnector\", \"kv_role\": \"kv_both\", \"kv_rol\": 1, \"kv_connector_extra_config\": {{\"cpu_bytes_to_use\": $BYTES, \"lazy_offload\": true}}}}'", 1, ("error: kv_rol: unknown key", "lazy_offload: ", "unknown: CONFIG: --kv-transfer-config has $BYTES, whose", "!cpu_bytes_to_use:")),
    "unknown role": (f"vllm serve m {K} '{one('ExampleConnector', role='$ROLE')}'", 0, ("unknown: CONFIG: --kv-transfer-config has $ROLE", "!error:")),
    "unknown options": (f"vllm serve m {K} '{one('OffloadingConnector', '$EXTRA')}'", 0, ("has $EXTRA", "!error:")),
    "unknown connector of two": (f"vllm serve m {K} '{TWO}'", 1, ("has $NIXL", "error: kv_connector_extra_config.connectors[1].kv_connector_extra_config.cpu_bytes_to_use: is missing", "!connectors[0]")),
    "of the container": (pod("$(KV)", f", env: [{{name: KV, value: {json.dumps(one('ExampleConnector'))}}}]"), 0, ("!not known", "no errors", "!engines:")),
    "of the container, in a shell": (IN_A_SHELL, 0, ("!not known", "no errors")),
    "names from a comment": ("# Run `make image` and $(dirname x)\nvllm serve m --config \"$CONFIG\" \"--log --kv-transfer-config x\"", 0, ("unknown: CONFIG: --kv-transfer-config is in a form that is not known here", "!make image", "!dirname")),
    # shape
    "defaults": ("_shared: {model_name: m, http_port: 8000, kv_connector: NixlConnector, kv_role: kv_both}\n", 0, ("unknown: CONFIG: 'kv_connector' is not an option of vLLM: a chart", "!error:")),
    "prose": (f"guide: |\n  Don't forget this.\n\n  ```bash\n  vllm serve m {K} '{one('ExampleConnector')}'\n  ```\n", 0, ("vLLM does not load kvobs with this configuration", "!error:")),
    "prose without a fence": (f"note: |\n  Don't forget.\n  vllm serve m {K} '{one('ExampleConnector')}'\n", 0, ("vLLM does not load kvobs with this configuration", "!error:")),
    "markdown": (f"# Serving\n\nNote: it's easy.\n\n```bash\nvllm serve m {K} '{one('ExampleConnector')}'\n```\n", 0, ("vLLM does not load kvobs with this configuration", "!error:")),
    "another server": (f"python -m atom.entrypoints.openai_server --model m {K} '{one('lmcache_offload', role='offload')}'", 0, ("unknown: CONFIG: the command starts atom.entrypoints, which is not vLLM", "!error:")),
    "python": ("import os\nfrom vllm import LLM\nllm = LLM('m', kv_transfer_config=KVTransferConfig(kv_connector='NixlConnector'))\n", 0, ("unknown: CONFIG: a Python program makes the configuration", "!error:")),
    "usage text": (f"#!/bin/sh\necho \"Usage: vllm serve MODEL {K} CONFIG\"\nvllm serve m {K} '{one('ExampleConnector')}'\n", 0, ("vLLM does not load kvobs with this configuration", "!error:")),
    "placeholder": (f"vllm serve m {K} '{{...}}'", 0, ("unknown: CONFIG: --kv-transfer-config has {...}, which stands for a configuration",)),
    "a file instead": (f"vllm serve m {K} kv.json", 1, ("error: CONFIG: the configuration is not valid JSON",)),
    "a script's own syntax": (f"x=${{y//\"/}}\nvllm serve m {K} '{NIXL}'\n", 0, ("!error:",)),
    "empty default": ("image: v\nkv-transfer-config: ''\nnixl: {enabled: false}\n", 0, ("unknown: CONFIG: 'nixl' is not an option", "!error:")),
    "key of a newer vLLM, in an image": (pod('{"kv_new_thing": 1, ' + one("ExampleConnector")[1:]), 0, ("warning: kv_new_thing: unknown key",)),
    "misspelt key in an image": (pod('{"kv_rol": 1, ' + one("ExampleConnector")[1:]), 1, ("error: kv_rol: unknown key",)),
    "escaped for compose": ("services:\n  a:\n    image: v\n    command: [sh, -c, 'vllm serve m --kv-transfer-config \"$$KV\"']\n    environment: {KV: " + json.dumps(json.dumps(json.loads(one("ExampleConnector")))) + "}\n", 0, ("!not known", "!engines:", "no errors")),
    "JSON without quotes": ("vllmArgs: " + json.dumps(f"{K} {one('ExampleConnector')} --port 8000") + "\n", 0, ("!error:", "vLLM does not load kvobs with this configuration")),
    "JSON without quotes, shell": (f"vllm serve m {K} {one('ExampleConnector')}", 1, ("error: CONFIG: the configuration is not valid JSON",)),
    "a template's numbers": (f"tensor_parallel_size: '{{{{ tp }}}}'\nport: ${{PORT}}\nkv_transfer_config: {one('ExampleConnector')}\n", 0, ("!error:", "vLLM does not load kvobs with this configuration")),
    "a template's size": ("kv_offloading_size: '{{ size }}'\n", 0, ("unknown: CONFIG: --kv-offloading-size has a value that is not known here", "!error:")),
    # lines
    "folded, compose": (f"services:\n  a:\n    image: v\n    network_mode: host\n    command: >\n      vllm serve m\n        --port 1\n        {K}\n        '{one('ExampleConnector')}'\n", 0, ("vLLM does not load kvobs with this configuration", "!error:", "!CONFIG")),
    "folded, list": (f"server_args:\n- >\n  --model m\n    {K}\n    '{one('ExampleConnector')}'\n", 0, ("vLLM does not load kvobs with this configuration", "!error:")),
    "folded, shell": (f"spec: {{}}\ncontainers:\n- command: [sh, -c]\n  args:\n  - >\n    vllm serve m\n      {K}\n      '{one('ExampleConnector')}'\n", 1, ("error: CONFIG: the command ends before --kv-transfer-config: YAML's '>' keeps the break before a deeper-indented line",)),
    "folded alike, shell": (f"containers:\n- command: [sh, -c]\n  args:\n  - >\n    vllm serve m\n    {K}\n    '{one('ExampleConnector')}'\n", 0, ("vLLM does not load kvobs with this configuration", "!error:")),
    # host
    "ranks": (pod(PER_RANK, ", resources: {limits: {memory: 60Mi}}").replace('"m", ', '"m", "-tp", "8", '), 1, ("error: resources.limits.memory: found 60Mi, while connectors keep 80,000,000 bytes",)),
    "one rank": (pod(PER_RANK, ", resources: {limits: {memory: 60Mi}}"), 0, ("!resources.limits",)),
    "ranks that are not known": (pod(PER_RANK, ", resources: {limits: {memory: 60Mi}}").replace('"m", ', '"m", "-tp", "$TP", '), 0, ("!resources.limits",)),
    "no prefix caching": (f"vllm serve m --no-enable-prefix-caching {K} '{PER_RANK}'", 0, ("warning: kv_connector: SimpleCPUOffloadConnector does nothing with --no-enable-prefix-caching",)),
    "no prefix caching in YAML": (f"enable_prefix_caching: false\nkv_transfer_config: {PER_RANK}\n", 0, ("does nothing with --no-enable-prefix-caching",)),
    "prefix caching": (f"vllm serve m --enable-prefix-caching {K} '{PER_RANK}'", 0, ("!does nothing",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_the_findings_are_those_that_help(kind: str, tmp_path: Path) -> None:
    text, status, words = CASES[kind]
    path = tmp_path / "given"
    path.write_text(text)
    result = CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "9999"})
    for each in words:
        assert (each.removeprefix("!") in result.output) != each.startswith("!"), result.output
    assert result.exit_code == status, result.output


def test_rewrite_prints_each_engine_by_its_place_or_one() -> None:
    text = f"a: {json.dumps([K, NIXL])}\nb: {json.dumps([K, one('ExampleConnector')])}\n"
    both = CliRunner().invoke(app, ["check", text, "--rewrite"])
    assert both.exit_code == 0
    configs = json.loads(both.stdout)
    assert [config["kv_connector_extra_config"]["connectors"][0]["kv_connector"] for config in configs.values()] == [
        "NixlConnector",
        "ExampleConnector",
    ]
    one_of_them = CliRunner().invoke(app, ["check", text, "--rewrite", "--place", "b"])
    assert json.loads(one_of_them.stdout) == configs["b"]
    other = CliRunner().invoke(app, ["check", text, "--rewrite", "--place", "c"])
    assert (other.exit_code, other.stdout) == (1, "")
    assert (
        "found no engine at c. Fix: give one of: a, b, or start vLLM with KVOBS_ENABLE=1, which needs no --rewrite."
        in other.stderr
    )
    alone = CliRunner().invoke(app, ["check", NIXL, "--place", "c"])
    assert "found no engine at c. Fix: leave out --place: this is a single configuration." in " ".join(
        alone.output.split()
    )
    part = CliRunner().invoke(app, ["check", text.replace(json.dumps(NIXL), '"$KV"'), "--rewrite"])
    assert (part.exit_code, [*json.loads(part.stdout)]) == (1, ["b"])
    assert "a\n\nunknown: CONFIG: --kv-transfer-config has $KV" in part.stderr


@pytest.mark.parametrize(("more", "length", "warns"), [
    ({}, 1000, True), ({}, 800, False), ({"layer_types": ["full", "sliding"]}, 1000, False), ({"num_hidden_layers": "x"}, 1000, False),
])  # fmt: skip
def test_memory_too_small_for_a_prompt_warns_if_a_model_is_here(
    more: dict[str, Any], length: int, warns: bool, tmp_path: Path
) -> None:
    model = {
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 9000,
    }
    (tmp_path / "config.json").write_text(json.dumps(model | more))
    config = one("OffloadingConnector", '{"cpu_bytes_to_use": 10000000}')
    result = CliRunner().invoke(app, ["check", f"vllm serve {tmp_path} --max-model-len {length} {K} '{config}'"])
    words = "its 10,000,000 bytes of memory (cpu_bytes_to_use) have room for 976 tokens, but a prompt may have 1,000 (max_model_len)"
    assert (words in result.output) is warns, result.output
