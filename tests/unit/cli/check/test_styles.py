"""Sixty files in the style of those that people publish: charts, manifests, compose, Slurm, CI, docs; verdicts first.

The verdict of each was written before its first run: engines, mistakes, how many are not known, and words of findings.
No file here has a mistake that is none.
"""

# ruff: noqa: E501
# A case is a line or a file.
import json
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from kvobs.cli import app

pytestmark = pytest.mark.usefixtures("bare_machine")


class Verdict(NamedTuple):
    """What a reader with time would say of a file; ``words`` are of findings, ! is before what no finding has."""

    engines: int
    mistakes: int = 0
    unknown: int = 0
    words: tuple[str, ...] = ()


UNSET, ROUTER = "VLLM_NIXL_SIDE_CHANNEL_HOST: is not set", "kvobs is not enabled"
FILES: dict[str, tuple[str, Verdict]] = {
    # manifests
    "decode with its address": ("""
        apiVersion: apps/v1
        kind: StatefulSet
        metadata: {name: decode}
        spec:
          template:
            spec:
              containers:
              - name: vllm
                image: ghcr.io/llm-d/llm-d-cuda:v0.5.0
                command: [vllm, serve]
                args: [Qwen/Qwen3-32B, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
                env:
                - name: VLLM_NIXL_SIDE_CHANNEL_HOST
                  valueFrom: {fieldRef: {fieldPath: status.podIP}}
        """, Verdict(1, words=(ROUTER, "!SIDE_CHANNEL"))),
    "two deployments, one producer": ("""
        apiVersion: apps/v1
        kind: Deployment
        metadata: {name: prefill}
        spec: {template: {spec: {containers: [{name: v, image: v, args: [m, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}']}]}}}
        ---
        apiVersion: apps/v1
        kind: Deployment
        metadata: {name: decode}
        spec: {template: {spec: {containers: [{name: v, image: v, args: [m, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}']}]}}}
        """, Verdict(2, words=(UNSET, "!in all", "!in the others"))),
    "mooncake in an image": ("""
        apiVersion: leaderworkerset.x-k8s.io/v1
        kind: LeaderWorkerSet
        metadata: {name: lws}
        spec:
          leaderWorkerTemplate:
            leaderTemplate:
              spec:
                containers:
                - name: leader
                  image: registry.example.com/vllm:mooncake
                  command: [sh, -c]
                  args:
                  - |
                    vllm serve deepseek-ai/DeepSeek-V3 \\
                      --tensor-parallel-size 8 \\
                      --kv-transfer-config '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}'
        """, Verdict(1, unknown=1, words=("mooncake-transfer-engine",))),
    "secret in the environment": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: p}
        spec:
          containers:
          - image: v
            name: v
            env: [{name: KV, valueFrom: {secretKeyRef: {name: s, key: kv}}}]
            args: [m, --kv-transfer-config, $(KV)]
        """, Verdict(1, unknown=1, words=("has $(valueFrom)",))),
    "value of the container": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: p}
        spec:
          containers:
          - image: v
            name: v
            env:
            - {name: SIZE, value: "10000000000"}
            args: [m, --kv-transfer-config, '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":$(SIZE)}}']
            resources: {limits: {memory: 8Gi}}
        """, Verdict(1, mistakes=1, words=("resources.limits.memory: found 8Gi, while connectors keep 10,000,000,000",))),
    "kserve makes it": ("""
        apiVersion: serving.kserve.io/v1alpha1
        kind: LLMInferenceService
        metadata: {name: q}
        spec:
          model: {uri: hf://Qwen/Qwen3-8B}
          workload:
            kvCacheOffloading: {cpu: {size: 40Gi}}
        """, Verdict(1, unknown=1, words=("KServe makes",))),
    "kserve, container": ("""
        apiVersion: serving.kserve.io/v1alpha1
        kind: LLMInferenceService
        metadata: {name: q}
        spec:
          template:
            containers:
            - name: main
              env: [{name: VLLM_ADDITIONAL_ARGS, value: "--kv-transfer-config '{\\"kv_connector\\":\\"NixlConnector\\",\\"kv_role\\":\\"kv_both\\"}'"}]
        """, Verdict(1, words=("!SIDE_CHANNEL",))),
    "ascend": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: npu}
        spec: {containers: [{name: v, image: quay.io/ascend/vllm-ascend:v0.32.0, args: [m, --kv-transfer-config, '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_producer","kv_port":"30000","engine_id":"0"}']}]}
        """, Verdict(1, unknown=1, words=("install vllm-ascend",))),
    "old image": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: old}
        spec: {containers: [{name: v, image: vllm/vllm-openai:v0.8.5, args: [m, --kv-transfer-config, '{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}']}]}
        """, Verdict(1, unknown=1, words=("PyNcclConnector",))),
    "misspelt role": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: p}
        spec: {containers: [{name: v, image: v, args: [m, '--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_prefill"}']}]}
        """, Verdict(1, mistakes=1, words=("kv_role: found 'kv_prefill'",))),
    "shared memory of tiers": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: p}
        spec:
          volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 10Gi}}]
          containers:
          - name: v
            image: v
            volumeMounts: [{name: shm, mountPath: /dev/shm}]
            args: [m, --kv-transfer-config, '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":107374182400,"secondary_tiers":[{"type":"fs","root_dir":"/kv"}]}}']
        """, Verdict(1, mistakes=1, words=("/dev/shm: found 10Gi",))),
    "a job that only downloads": ("""
        apiVersion: batch/v1
        kind: Job
        metadata: {name: download}
        spec: {template: {spec: {containers: [{name: d, image: python, command: [hf, download, m]}]}}}
        """, Verdict(1, unknown=1, words=("contain no engine",))),
    # charts
    "chart, two roles": ("""
        prefill:
          replicas: 2
          containers:
          - name: vllm
            image: ghcr.io/llm-d/llm-d-cuda:v0.5.0
            modelCommand: vllmServe
            args: [--kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}']
            env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
        decode:
          containers:
          - name: vllm
            image: ghcr.io/llm-d/llm-d-cuda:v0.5.0
            args: [--kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute"}']
            env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
        """, Verdict(2, words=("!SIDE_CHANNEL", "!in all"))),
    "production stack, lmcache": ("""
        servingEngineSpec:
          modelSpec:
          - name: q
            repository: lmcache/vllm-openai
            tag: latest
            lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "60"}
        """, Verdict(1, unknown=1, words=("the chart makes a --kv-transfer-config from lmcacheConfig",))),
    "production stack, arguments": ("""
        servingEngineSpec:
          modelSpec:
          - name: q
            repository: vllm/vllm-openai
            tag: v0.32.0
            vllmConfig:
              extraArgs: ["--kv-transfer-config", '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":10000000000}}']
        """, Verdict(1, words=(ROUTER,))),
    "template of a chart": ("""
        apiVersion: apps/v1
        kind: Deployment
        metadata: {name: x}
        spec:
          template:
            spec:
              containers:
              - args:
                {{- if .Values.kv.enabled }}
                - --kv-transfer-config
                - {{ .Values.kv.config | toJson | quote }}
                {{- end }}
        """, Verdict(1, unknown=1, words=("helm template",))),
    "defaults of a benchmark": ("""
        _anchors:
          common: &common
            model: m
            http_port: 8000
            replicas: 1
            kv_connector: NixlConnector
            kv_role: kv_both
        vllm: {port: 8000}
        """, Verdict(1, unknown=1)),
    "key of a chart's own": ("""
        model: {name: q}
        kvTransfer: {enabled: true, connector: nixl}
        """, Verdict(1, unknown=1, words=("kvTransfer",))),
    "lists of texts with equals": ("""
        extraArgs:
        - --port=8000
        - '--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":10737418240}}'
        """, Verdict(1, words=(ROUTER,))),
    "modules of a chart, a misspelt option": ("""
        engine:
          image: {repository: vllm/vllm-openai, tag: v0.32.0}
          args:
          - --kv-transfer-config
          - '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_extra_config":{"kv_lease_duratoin":300}}'
        """, Verdict(1, words=("kv_lease_duratoin: has no effect", "use 'kv_lease_duration'"))),
    # compose
    "compose, text": ("""
        services:
          vllm:
            image: vllm/vllm-openai:v0.32.0
            command: --model m --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":8589934592}}'
            shm_size: 16gb
        """, Verdict(1, words=("!/dev/shm",))),
    "compose, folded": ("""
        services:
          vllm:
            image: registry.example.com/v
            command: >
              vllm serve m
                --kv-transfer-config
                '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}'
                --no-enable-chunked-prefill
        """, Verdict(1, words=(ROUTER, "!chunked"))),
    "compose, the argument is elsewhere": ("""
        services:
          vllm:
            image: rocm/vllm
            command: --model m ${KV_TRANSFER_ARG:-}
        """, Verdict(1, unknown=1, words=("KV_TRANSFER_ARG",))),
    "compose, default in the JSON": ("""
        services:
          vllm:
            image: v
            command: ["--model", "m", "--kv-transfer-config", "{\\"kv_connector\\":\\"LMCacheMPConnector\\",\\"kv_role\\":\\"kv_both\\",\\"kv_connector_extra_config\\":{\\"lmcache.mp.port\\":${PORT:-6555},\\"lmcache.mp.mq_timeout\\":5}}"]
        """, Verdict(1, unknown=1, words=("'lmcache'", "!PORT"))),
    "compose, two on the host": ("""
        services:
          p: {image: v, network_mode: host, command: [m, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}']}
          d: {image: v, network_mode: host, environment: {VLLM_NIXL_SIDE_CHANNEL_PORT: 5700}, command: [m, --port, "8001", --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}']}
        """, Verdict(2, words=("!SIDE_CHANNEL_HOST", "!which is VLLM_NIXL"))),
    "compose, two ports alike": ("""
        services:
          p: {image: v, network_mode: host, command: [m, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}']}
          d: {image: v, network_mode: host, command: [m, --port, "8001", --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}']}
        """, Verdict(2, words=("VLLM_NIXL_SIDE_CHANNEL_PORT: found port 5600",))),
    "compose, another server": ("""
        services:
          s:
            image: lmsysorg/sglang
            command: python3 -m sglang.launch_server --model-path m --kv-transfer-config '{"kv_connector":"x","kv_role":"offload"}'
        """, Verdict(1, unknown=1, words=("is not vLLM",))),
    "compose, a hash and an anchor": ("""
        x-base: &base
          image: v
          environment: [VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7]
        services:
          a:
            <<: *base
            command: [m, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'] # both
        """, Verdict(1, words=(ROUTER, "!SIDE_CHANNEL_HOST"))),
    # Slurm and shell
    "slurm, pyxis": ("""
        #!/bin/bash
        #SBATCH --nodes=2
        #SBATCH --gpus-per-node=8
        IMAGE=vllm/vllm-openai:v0.32.0
        srun --container-image=$IMAGE --nodes=1 bash -c "vllm serve m --tensor-parallel-size 8 --kv-transfer-config '{\\"kv_connector\\":\\"LMCacheConnectorV1\\",\\"kv_role\\":\\"kv_both\\"}'"
        """, Verdict(1, unknown=1, words=("'lmcache'",))),
    "slurm, roles by a loop": ("""
        #!/bin/bash
        #SBATCH -N 2
        for role in kv_producer kv_consumer; do
          srun -N1 vllm serve m --kv-transfer-config "{\\"kv_connector\\":\\"NixlConnector\\",\\"kv_role\\":\\"$role\\"}" &
        done
        wait
        """, Verdict(1, unknown=1, words=("has $role",))),
    "values of a script": ("""
        #!/usr/bin/env bash
        set -euo pipefail
        ROLE=kv_producer
        LEASE=300
        KV='{"kv_connector":"NixlConnector","kv_role":"'$ROLE'","kv_connector_extra_config":{"kv_lease_duration":'$LEASE'}}'
        exec vllm serve "$1" --kv-transfer-config "$KV"
        """, Verdict(1, words=(ROUTER,))),
    "size by arithmetic": ("""
        #!/bin/bash
        BYTES=$((64 * 1024 * 1024 * 1024))
        vllm serve m --kv-transfer-config "{\\"kv_connector\\":\\"OffloadingConnector\\",\\"kv_role\\":\\"kv_both\\",\\"kv_connector_extra_config\\":{\\"cpu_bytes_to_use\\":$BYTES,\\"lazy_offload\\":true}}"
        """, Verdict(1, unknown=1, words=("lazy_offload",))),
    "usage and functions": ("""
        #!/bin/bash
        # Usage: $0 [--dry] `make image`
        usage() { echo "Usage: $(basename "$0") MODEL"; }
        start() { vllm serve "$MODEL" "$@"; }
        start --kv-transfer-config '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}' --no-enable-chunked-prefill
        """, Verdict(1, words=("!basename", "!make image"))),
    "array": ("""
        ARGS=(
          --port 8000
          --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        )
        vllm serve m "${ARGS[@]}"
        """, Verdict(1, words=(ROUTER,))),
    "a branch": ("""
        if [ "$1" = cpu ]; then KV='{"kv_connector":"OffloadingConnector"}'; fi
        vllm serve m --kv-transfer-config "$KV"
        """, Verdict(1, unknown=1, words=("has $KV",))),
    "ssh to both": ("""
        ssh gpu-1 "vllm serve m --kv-transfer-config '{\\"kv_connector\\":\\"NixlConnector\\",\\"kv_role\\":\\"kv_producer\\"}'" &
        ssh gpu-2 "vllm serve m --kv-transfer-config '{\\"kv_connector\\":\\"NixlConnector\\",\\"kv_role\\":\\"kv_consumer\\"}'" &
        """, Verdict(2, words=("!which is VLLM_NIXL", "!in all"))),
    "prefill only": ("""
        for i in 1; do :; done
        CUDA_VISIBLE_DEVICES=0 vllm serve m --port 8100 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &
        CUDA_VISIBLE_DEVICES=1 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 vllm serve m --port 8101 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &
        """, Verdict(2, words=("in all 2 engines",))),
    "docker with its address": ("""
        docker run --gpus all -e VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.4 -p 8000:8000 \\
          vllm/vllm-openai:v0.32.0 --model m \\
          --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        """, Verdict(1, words=("!SIDE_CHANNEL",))),
    "docker, all addresses": ("""
        docker run --gpus all -e VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0 vllm/vllm-openai m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        """, Verdict(1, words=("found '0.0.0.0'",))),
    "podman, lmcache": ("""
        podman run lmcache/vllm-openai:v0.5 Qwen/Qwen3-8B --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
        """, Verdict(1, unknown=1)),
    "moriio without its port": ("""
        VLLM_MORIIO_NUM_WORKERS=4 vllm serve m --kv-transfer-config '{"kv_connector":"MoRIIOConnector","kv_role":"kv_producer","kv_connector_extra_config":{"proxy_ip":"10.0.0.1","proxy_ping_port":"36367"}}'
        """, Verdict(1, mistakes=3, words=("http_port: is missing", "VLLM_MORIIO_NUM_WORKERS: has no effect", "'mori'"))),
    "dynamo's connectors": ("""
        #!/bin/bash
        trap 'kill 0' EXIT
        python -m dynamo.frontend &
        DYN_KVBM_CPU_CACHE_GB=20 python -m dynamo.vllm --model m --connector kvbm nixl --is-prefill-worker
        """, Verdict(1, unknown=1, words=("Dynamo makes",))),
    "systemd": ("""
        [Unit]
        Description=vLLM
        [Service]
        Environment=VLLM_LOGGING_LEVEL=INFO
        ExecStart=/opt/v/bin/vllm serve m --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":"8GiB"}}'
        """, Verdict(1, mistakes=1, words=("cpu_bytes_to_use: found a value of type str",))),
    "makefile": ("""
        serve:
        \tvllm serve m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        """, Verdict(1, words=(ROUTER,))),
    "single quotes in JSON": ("""
        vllm serve m --kv-transfer-config "{'kv_connector': 'NixlConnector', 'kv_role': 'kv_both'}"
        """, Verdict(1, mistakes=1, words=("needs double quotes",))),
    "python": ("""
        from vllm import LLM
        from vllm.config import KVTransferConfig
        llm = LLM("m", kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"))
        """, Verdict(1, unknown=1, words=("Python program",))),
    # CI
    "workflow": ("""
        jobs:
          serve:
            runs-on: gpu
            container: vllm/vllm-openai:v0.32.0
            steps:
            - uses: actions/checkout@v4
            - run: |
                vllm serve m --port 8000 \\
                  --kv-transfer-config '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"lookup_async":true,"enable_offload":true}}' &
        """, Verdict(1, unknown=1, words=("enable_offload: has no effect",))),
    "workflow, folded": ("""
        jobs:
          serve:
            runs-on: gpu
            steps:
            - run: >
                vllm serve m
                  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        """, Verdict(1, mistakes=1, words=("the command ends before",))),
    "harness, folded": ("""
        deployment:
        - server_cmd: >
            vllm serve m
              --kv-transfer-config
              '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        """, Verdict(1, words=(ROUTER,))),
    "buildkite": ("""
        steps:
        - label: pd
          commands:
          - pip install nixl
          - vllm serve m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_extra_config":{"backends":["UCX"]}}' &
        """, Verdict(1, words=(ROUTER, "!no effect"))),
    "matrix": ("""
        matrix:
          connector: [NixlConnector, OffloadingConnector]
        steps:
        - run: vllm serve m --kv-transfer-config '{"kv_connector":"${{ matrix.connector }}","kv_role":"kv_both"}'
        """, Verdict(1, unknown=1, words=("matrix.connector",))),
    # documents
    "markdown": ("""
        # Serving

        It's simple. Don't forget the port:

        ```bash
        vllm serve m --port 8000 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        ```
        """, Verdict(1, words=(ROUTER,))),
    "recipe": ("""
        title: Model
        guide: |
          ## Offloading

          This model's KV doesn't fit:

          ```bash
          vllm serve m --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":80G}}'
          ```
        """, Verdict(1, words=(ROUTER,))),
    "prose alone": ("""
        Notes: the server's flag --kv-transfer-config isn't set here, see the wiki.
        """, Verdict(1, unknown=1)),
    # vLLM's own and Ray's
    "vllm.yaml": ("""
        model: m
        tensor-parallel-size: 4
        kv-transfer-config: '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use_per_rank":10000000000}}'
        enable-prefix-caching: false
        """, Verdict(1, words=("does nothing with --no-enable-prefix-caching",))),
    "ray serve": ("""
        applications:
        - name: llm
          import_path: ray.serve.llm:build_openai_app
          args:
            llm_configs:
            - model_loading_config: {model_id: m}
              engine_kwargs:
                kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}
        """, Verdict(1, words=(ROUTER, "!SIDE_CHANNEL_HOST"))),
    "router, one connector of an image": ("""
        apiVersion: v1
        kind: Pod
        metadata: {name: p}
        spec: {hostNetwork: true, containers: [{name: v, image: v, args: [m, --kv-transfer-config, '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both"},{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"load_async":true,"lookup_async":true}}]}}']}]}
        """, Verdict(1, unknown=1, words=("kv_connector_module_path: kvobs is not enabled", "!SIDE_CHANNEL"))),
    "router by YAML": ("""
        kv_transfer_config:
          kv_connector: MultiConnector
          kv_role: kv_both
          kv_connector_extra_config:
            connectors:
            - {kv_connector: NixlConnector, kv_role: kv_both, kv_connector_extra_config: {enable_cross_layers_blocks: "True"}}
            - {kv_connector: OffloadingConnector, kv_role: kv_both, kv_connector_extra_config: {cpu_bytes_to_use: 10000000000}}
        """, Verdict(1, words=("enable_cross_layers_blocks: has no effect",))),
    "tier without its folder": ("""
        vllm serve m --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":1000000000,"secondary_tiers":[{"type":"fs","path":"/kv"}]}}'
        """, Verdict(1, mistakes=2, words=("root_dir: is missing", "path: unknown option"))),
    "prefill here, mooncake there": ("""
        apiVersion: workload.volcano.sh/v1
        kind: ModelBooster
        metadata: {name: m}
        spec:
          backends:
          - workers:
            - {type: prefill, image: v, config: {kv-transfer-config: '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'}}
            - {type: decode, image: v, config: {kv-transfer-config: '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}'}}
        """, Verdict(2, unknown=1, words=("which can't hand KV over to each other",))),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_the_verdict_is_that_of_a_reader_with_time(kind: str, tmp_path: Path) -> None:
    text, verdict = FILES[kind]
    path = tmp_path / "given"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    result = CliRunner().invoke(app, ["check", str(path), "--json"])
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    found = {
        kind: [finding for answer in answers for finding in answer[kind]] for kind in ("errors", "warnings", "unknown")
    }
    said = [
        f"{finding['path']}: {finding['found']}. Fix: {finding['fix']}" for its in found.values() for finding in its
    ]
    assert len(found["errors"]) == verdict.mistakes, said
    assert (len(answers), len(found["unknown"])) == (verdict.engines, verdict.unknown), said
    for words in verdict.words:
        assert any(words.removeprefix("!") in text for text in said) != words.startswith("!"), said
    assert result.exit_code == (verdict.mistakes > 0)


def test_there_are_sixty() -> None:
    assert len(FILES) == 60
