"""What other people's charts take: the keys that our examples use, with their types, as facts.

Read in November 2026 in each chart's ``values.schema.json``, and in its templates. Their own schemas let unknown keys
pass at most levels; ours do not, so that a slip in an example is found.
"""

from typing import Any

VLLM_STACK = {
    "servingEngineSpec": {
        "runtimeClassName": str,
        "modelSpec": [
            {
                **dict.fromkeys(("name", "repository", "tag", "modelURL", "requestMemory", "shmSize"), str),
                **dict.fromkeys(("replicaCount", "requestCPU", "requestGPU"), int),
                "vllmConfig": {"enablePrefixCaching": bool, "tensorParallelSize": int, "extraArgs": [str]},
                "env": [dict],
            }
        ],
        "serviceMonitor": {"enabled": bool},
    }
}
"""github.com/vllm-project/production-stack, helm/, chart vllm-stack."""

_CONTAINER = {
    **dict.fromkeys(("name", "image", "modelCommand"), str),
    "args": [str],
    "env": [dict],
    "ports": [{"name": str, "containerPort": int, "protocol": str}],
    "mountModelVolume": bool,
    "volumeMounts": [dict],
}
_ROLE = {
    "replicas": int,
    "containers": [_CONTAINER],
    "volumes": [dict],
    "monitoring": {"podmonitor": {"enabled": bool}},
}
MODELSERVICE = {
    "modelArtifacts": {
        **dict.fromkeys(("name", "uri", "size"), str),
        "labels": {"llm-d.ai/inferenceServing": str, "llm-d.ai/model": str},
    },
    "routing": {"servicePort": int, "proxy": {"targetPort": int, "connector": str}},
    "prefill": _ROLE,
    "decode": _ROLE,
}
"""github.com/llm-d-incubation/llm-d-modelservice, charts/llm-d-modelservice, 0.4; llm-d 0.7 has Kustomize instead."""

GUIDE = {
    name: [
        "openai/gpt-oss-120b",
        "--disable-access-log-for-endpoints=/health,/metrics,/v1/models",
        f"--tensor-parallel-size={size}",
        "--block-size=128",
        "--kv-transfer-config",
        '{"kv_connector":"NixlConnector","kv_role":"kv_both"}',
        *more,
    ]
    for name, size, more in (("prefill", 1, ()), ("decode", 4, ("--port=8200",)))
}
"""github.com/llm-d/llm-d, guides/pd-disaggregation, variant multi-tier: Deployments, their container's arguments."""
GUIDE_CONTAINER, GUIDE_IMAGE, GUIDE_PREFIX = "modelserver", "docker.io/vllm/vllm-openai", "pd-disaggregation-"

_NAMES = {str: "string", int: "integer", bool: "boolean", dict: "object"}


def schema(shape: Any) -> dict[str, Any]:
    """Return the JSON schema of a shape: a type, a list with the shape of its items, or the keys that there are."""
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0]), "minItems": 1}
    if isinstance(shape, dict):
        properties = {key: schema(inner) for key, inner in shape.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": _NAMES[shape]}
