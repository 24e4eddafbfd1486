"""vLLM's FlexKVConnectorV1; the library that it calls is not on PyPI and stood in for, after its adapter's behaviour.

FlexKV moves KV on the scheduler's side: a lookup matches, a step launches or cancels what was matched, a request that
ends well is saved, and what is done is said by assigning to the workers' output.
"""

import itertools
import sys
from types import ModuleType
from typing import Any

from tests.connectors.memory import BLOCK, chain, page_is_right
from tests.connectors.plug import Idle, Plug, entries, held


class FlexKV(Plug):
    connector = "FlexKVConnectorV1"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pages: dict[tuple[int, ...], Any] = {}

    def install(self, patch: Any) -> None:
        name = "flexkv.integration.vllm.vllm_v1_adapter"
        for module in itertools.accumulate(name.split("."), "{}.{}".format):
            patch.setitem(sys.modules, module, ModuleType(module))
        sys.modules[name].FlexKVConnectorV1Impl = _adapter  # type: ignore[attr-defined]

    def leftovers(self) -> list[str]:
        adapter = self.on_scheduler._flexkv_connector
        open_ = (*adapter.matched, *adapter.ordered, *adapter.running)
        return entries(adapter, "tasks") + [f"{task.kind} of {task.request_id}" for task in open_]


def _adapter(vllm_config: Any, role: Any) -> Any:
    return SchedulerAdapter(FlexKV.of(vllm_config)) if role.name == "SCHEDULER" else Idle()


class Task:
    """A get or a put: of which request, which tokens, and from or into which blocks."""

    def __init__(self, kind: str, request_id: str, tokens: list[int], first: int) -> None:
        self.kind, self.request_id, self.tokens, self.first = kind, request_id, tokens, first
        self.blocks: list[int] = []
        self.due = 0


class SchedulerAdapter(Idle):
    """What FlexKV's adapter does in the scheduler."""

    def __init__(self, plug: FlexKV) -> None:
        self.plug = plug
        self.tasks: dict[str, Task] = {}  # by request
        self.matched: list[Task] = []  # cancelled in the next step unless somebody wants them
        self.ordered: list[Task] = []
        self.running: list[Task] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.plug.may_fail("get_match")
        whole = request.num_tokens // BLOCK * BLOCK
        tokens = list(request.all_token_ids[:whole])
        end = held(self.plug.pages, tokens, num_computed_tokens)
        if end == num_computed_tokens:
            return 0, False
        task = Task("get", request.request_id, tokens[:end], num_computed_tokens // BLOCK)
        self.tasks[request.request_id] = task
        self.matched.append(task)
        return end - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        task = self.tasks[request.request_id]
        self.matched.remove(task)
        self.ordered.append(task)
        count = num_external_tokens // BLOCK
        task.blocks = blocks.get_block_ids()[0][task.first : task.first + count]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

        for task in self.matched:
            if self.tasks.get(task.request_id) is task:
                del self.tasks[task.request_id]
        self.matched.clear()
        self.plug.may_fail("launch")
        for task in self.ordered:
            task.due = self.plug.now + self.plug.delay()
        self.running += self.ordered
        self.ordered.clear()
        return KVConnectorMetadata()

    def update_connector_output(self, output: Any) -> None:
        done = [task for task in self.running if task.due <= self.plug.now]
        for task in done:
            self.running.remove(task)
            self._run(task)
            del self.tasks[task.request_id]
        output.finished_sending = {task.request_id for task in done if task.kind == "put"}
        output.finished_recving = {task.request_id for task in done if task.kind == "get"}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if request.request_id in self.tasks:
            return True, None  # its load goes on
        if request.get_finished_reason() not in (0, 1):
            return False, None
        whole = (request.num_tokens - 1) // BLOCK * BLOCK  # the last token was sampled, not computed
        tokens = list(request.all_token_ids[:whole])
        first = held(self.plug.pages, tokens)
        if first >= whole:
            return False, None
        task = Task("put", request.request_id, tokens, first // BLOCK)
        task.blocks = block_ids[first // BLOCK : whole // BLOCK]
        self.tasks[request.request_id] = task
        self.ordered.append(task)
        return True, None

    def _run(self, task: Task) -> None:
        values = chain(task.tokens)
        for memory in self.plug.memories.values():
            for index, block in enumerate(task.blocks, start=task.first):
                key = tuple(task.tokens[: (index + 1) * BLOCK])
                if task.kind == "put":
                    page = memory.page(block)
                    is_right = page_is_right(page, values[index * BLOCK : (index + 1) * BLOCK])
                    self.plug.check_store(is_right, f"{task.request_id}: block {index}")
                    self.plug.pages[key] = page
                else:
                    memory.put(block, self.plug.pages[key])
        self.plug.loaded += task.kind == "get"
