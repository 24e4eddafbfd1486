"""Fail each synchronous load with ``recompute``, and compare the answers with computed ones.

For a GPU: ``python failed_sync_load.py [MODEL]``, with ``ASYNC=0`` for synchronous scheduling, and with
``VLLM_USE_V2_MODEL_RUNNER=0`` for the V1 model runner.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler in this process, so that a switch reaches it


BLOCK = 32


@dataclass
class Loads(KVConnectorMetadata):
    blocks: set[int] = field(default_factory=set)


class FailingConnector(KVConnectorBase_V1):
    """Offer each prompt but its last token, write nothing, and report the blocks as failed."""

    offers = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loads = Loads()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (max(0, request.num_tokens - 1 - num_computed_tokens) // BLOCK * BLOCK if self.offers else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.loads.blocks.update(blocks.get_block_ids()[0][: num_external_tokens // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self.loads = self.loads, Loads()
        return loads

    def get_block_ids_with_load_errors(self) -> set[int]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        return metadata.blocks

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="FailingConnector",
        kv_connector_module_path="__main__",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    llm = LLM(
        model=sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B",
        kv_transfer_config=transfer,
        async_scheduling=os.environ.get("ASYNC", "1") == "1",
        enable_prefix_caching=False,
        block_size=BLOCK,
        max_model_len=512,
        enforce_eager=True,
        dtype="float32",
    )
    config = llm.llm_engine.vllm_config
    print("V2 runner:", config.use_v2_model_runner, "async:", config.scheduler_config.async_scheduling)
    prompts: list[Any] = [
        {"prompt_token_ids": [3 + (31 * i + 7 * j) % 200 for j in range(70 + 5 * i)]} for i in range(16)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = []
    for FailingConnector.offers in (False, True):
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, sampling)])
    print("right answers after failed loads:", sum(a == b for a, b in zip(*answers, strict=True)), "of", len(prompts))


if __name__ == "__main__":
    main()
