"""The minimal inputs of a review of 445 public files with connectors: each has the findings that its author needs."""

# ruff: noqa: E501
# A case is a line.
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from tests.support.contexts import no_otel_variables

K = "--kv-transfer-config"


def one(connector: str, extra: str = "", role: str = "kv_both") -> str:
    own = f', "kv_connector_extra_config": {extra}' if extra else ""
    return f'{{"kv_connector": "{connector}", "kv_role": "{role}"{own}}}'


def pod(config: str, container: str = "", image: str = "image: v,", kind: str = "Deployment") -> str:
    head = f"apiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: vllm}}\n"
    args = json.dumps(["m", K, config])
    return f"{head}spec: {{template: {{spec: {{containers: [{{name: vllm, {image} args: {args}{container}}}]}}}}}}\n"


NIXL, LMCACHE, ASCEND = (
    one("NixlConnector"),
    one("LMCacheMPConnector", '{"lmcache.mp.mq_timeout": 5}'),
    one("MooncakeConnectorV1"),
)

P2P = one(
    "OffloadingConnector",
    '{"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000, "secondary_tiers": [{"type": "p2p"}]}',
)
MOONCAKE = one("MooncakeConnector", role="kv_consumer")

# Text, exit status, words of findings in their order: mistakes, warnings, unknown; ! is before what is not there.
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "library in an image": (pod(LMCACHE), 0, ("unknown: kv_connector: found 'LMCacheMPConnector', which needs 'lmcache', which is not installed here. Fix: check in the image, or here: install it: pip install lmcache.", "!mistake:")),
    "library, docker": (f"docker run vllm/vllm-openai m {K} '{LMCACHE}'", 0, ("unknown: kv_connector: found",)),
    "library, on this machine": (f"vllm serve m {K} '{LMCACHE}'", 1, ("mistake: kv_connector: found 'LMCacheMPConnector', which needs 'lmcache'",)),
    "plugin in an image": (pod(ASCEND), 0, ("unknown: kv_connector: found 'MooncakeConnectorV1', which this vLLM does not have. Fix: check in the image, or here: install vllm-ascend",)),
    "plugin, on this machine": (f"vllm serve m {K} '{ASCEND}'", 1, ("mistake: kv_connector: found 'MooncakeConnectorV1'",)),
    "module in an image": (pod(one("X").replace("{", '{"kv_connector_module_path": "x.y", ', 1)), 0, ("unknown: kv_connector: found 'X', whose module 'x.y' is not installed here",)),
    "misspelt name in an image": (pod(one("NixlConector")), 1, ("mistake: kv_connector: found 'NixlConector'", "Fix: use 'NixlConnector'", "!unknown:")),
    "compose with build": (f"services: {{a: {{build: ., command: {json.dumps([K, LMCACHE])}}}}}", 0, ("unknown: kv_connector",)),
    "several in an image": (pod(f'{{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {{"connectors": [{LMCACHE}, {one("MoRIIOConnector")}]}}}}'), 0, ("connectors[0].kv_connector: found", "connectors[1].kv_connector: found", "2 not known here")),
    # peers
    "no host": (pod(NIXL), 0, ("warning: environment variable VLLM_NIXL_SIDE_CHANNEL_HOST: is not set: NixlConnector tells another engine 'localhost', which it takes for itself. Fix: set it to the pod's or container's address: in Kubernetes by a fieldRef to status.podIP.",)),
    "host of this pod": (pod(NIXL, ", env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: 0.0.0.0}]"), 0, ("warning: environment variable VLLM_NIXL_SIDE_CHANNEL_HOST: found '0.0.0.0', which another engine takes for itself",)),
    "host of the pod": (pod(NIXL, ", env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]"), 0, ("!SIDE_CHANNEL",)),
    "host from elsewhere": (pod(NIXL, ", envFrom: [{configMapRef: {name: nixl}}]"), 0, ("!SIDE_CHANNEL",)),
    "no network": (pod(NIXL).replace("containers:", "hostNetwork: true, containers:"), 0, ("!SIDE_CHANNEL",)),
    "host by its maker": (pod(NIXL, kind="LLMInferenceService"), 0, ("!SIDE_CHANNEL",)),
    "host by dynamo": (pod(NIXL, ", command: [python3, -m, dynamo.vllm]"), 0, ("!SIDE_CHANNEL",)),
    "no host, docker": (f"docker run vllm/vllm-openai m {K} '{NIXL}'", 0, ("VLLM_NIXL_SIDE_CHANNEL_HOST: is not set",)),
    "host, docker": (f"docker run -e VLLM_NIXL_SIDE_CHANNEL_HOST=10.1.2.3 vllm/vllm-openai m {K} '{NIXL}'", 0, ("!SIDE_CHANNEL",)),
    "docker on the host's network": (f"docker run --network host vllm/vllm-openai m {K} '{NIXL}'", 0, ("!SIDE_CHANNEL",)),
    "no host, on this machine": (f"vllm serve m {K} '{NIXL}'", 0, ("!SIDE_CHANNEL",)),
    "no host of the tier": (pod(P2P), 0, ("VLLM_P2P_SIDE_CHANNEL_HOST: is not set", "!NIXL_SIDE")),
    "host of the tier": (pod(P2P.replace('"p2p"', '"p2p", "host": "10.1.2.3"')), 0, ("!SIDE_CHANNEL",)),
    "two kinds": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nvllm serve m --port 1 {K} '{MOONCAKE}' &\n", 1, ("warning: kv_connector: found NixlBaseConnector here and MooncakeConnector in the others of this file, which can't hand KV over to each other",)),
    "two producers": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\n", 0, ("warning: kv_role: found 'kv_producer' in all 2 engines with NixlBaseConnector of this file: none takes their KV",)),
    "two consumers": (f"vllm serve m {K} '{one('NixlConnector', role='kv_consumer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlConnector', role='kv_consumer')}' &\n", 0, ("none computes their KV",)),
    "a pair": (f"vllm serve m {K} '{one('NixlConnector', role='kv_producer')}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{one('NixlPullConnector', role='kv_consumer')}' &\n", 0, ("!in the others", "!in all")),
    "two that do both": (f"vllm serve m {K} '{NIXL}' &\nVLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m {K} '{NIXL}' &\n", 0, ("!in the others", "!in all")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens, and no variable is set."""
    no_otel_variables(monkeypatch)
    monkeypatch.setattr("kvobs.cli.check.check.listen", Mock())


@pytest.mark.parametrize("kind", CASES)
def test_the_findings_are_those_that_help(kind: str, tmp_path: Path) -> None:
    text, status, words = CASES[kind]
    path = tmp_path / "given"
    path.write_text(text)
    result = CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "9999"})
    for each in words:
        assert (each.removeprefix("!") in result.output) != each.startswith("!"), result.output
    assert result.exit_code == status, result.output
