"""Run vLLM's real scheduler around a connector that offers loads, in one process and without a model."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
"""Tokens in a block of the KV cache."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}


class OfferingConnector(KVConnectorBase_V1):
    """Offer the tokens in ``offers`` of each request, beyond those in vLLM's prefix cache, and move nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offers: dict[str, int] = {}
        self.is_async = True
        self.promises_saves = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = max(0, self.offers.get(request.request_id, 0) - num_computed_tokens)
        return tokens, tokens > 0 and self.is_async

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return self.promises_saves, None

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None: ...
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def make_scheduler(blocks: int, kind: type[Scheduler] = Scheduler) -> Any:
    """Build a scheduler with a KV cache of so many blocks, of which vLLM keeps one for itself."""
    transfer = KVTransferConfig(
        kv_connector="OfferingConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(LLAMA))
        arguments = EngineArgs(model, skip_tokenizer_init=True, max_model_len=1024, kv_transfer_config=transfer)
        config = arguments.create_engine_config()
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layer)])
    init_none_hash(sha256)
    return kind(config, caches, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)


def add(scheduler: Any, name: str, tokens: int, offered: int = 0, first: int = 0) -> Any:
    """Add a request of so many tokens, ``first`` and so on, of which the connector offers the first ``offered``."""
    scheduler.connector.offers[name] = offered
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = [(first + i) % 256 for i in range(tokens)]
    request = Request(name, prompt, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))
    scheduler.add_request(request)
    return request


def blocks_of(scheduler: Any, name: str) -> list[int]:
    return scheduler.kv_cache_manager.get_block_ids(name)[0]


def finish(scheduler: Any, scheduled: Any, **reports: Any) -> None:
    """Finish a step: a token of each request that it completes, and the workers' reports on loads and saves."""
    names = list(scheduled.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[7] if r.num_computed_tokens >= r.num_prompt_tokens else [] for r in requests],
        kv_connector_output=KVConnectorOutput(**reports),
    )
    scheduler.update_from_output(scheduled, output)


def step(scheduler: Any, **reports: Any) -> dict[str, int]:
    """Run a step; return how many tokens of each request it computed."""
    scheduled = scheduler.schedule()
    finish(scheduler, scheduled, **reports)
    return dict(scheduled.num_scheduled_tokens)
