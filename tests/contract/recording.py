"""Child connectors that note every hook call, whatever hooks the vLLM at hand has.

``Loader`` offers tokens for an async load and reports it received; ``Saver`` promises a save for each request and
reports it when the request has finished. Both answer everything else as vLLM's base class does. Import this module
after anything that changes vLLM's base classes.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from .members import public_members

OFFERED_TOKENS = 64
PARAMS = {"saver": "was here"}


class Call(NamedTuple):
    """One call of a hook of one child."""

    hook: str
    args: tuple[Any, ...]


class Handshake(KVConnectorHandshakeMetadata):
    """Says which child it comes from."""

    def __init__(self, child: str) -> None:
        self.child = child


class WorkerMetadata(KVConnectorWorkerMetadata):
    """Says which child it comes from."""

    def __init__(self, child: str) -> None:
        self.child = child

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        return self


def _noting(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    is_abstract = getattr(default, "__isabstractmethod__", False)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorded.append(Call(name, (*args, *kwargs.values())))
        answer = getattr(self, f"answer_{name}", None)
        if answer is not None:
            return answer(*args, **kwargs)
        return None if is_abstract else default(self, *args, **kwargs)

    return hook


NOTING_HOOKS = {name: _noting(name, member) for name, member in public_members().items() if inspect.isfunction(member)}

Noting: Any = type("Noting", (KVConnectorBase_V1, SupportsHMA), NOTING_HOOKS)
"""Notes its calls in ``recorded`` and answers with its ``answer_<hook>``, where it has one."""


class RecordingChild(Noting):
    """Loads nothing and promises nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.recorded: list[Call] = []
        super().__init__(vllm_config, role, kv_cache_config)

    def answer_get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def answer_build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def answer_request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def answer_get_handshake_metadata(self) -> Handshake:
        return Handshake(type(self).__name__)

    def answer_build_connector_worker_meta(self) -> WorkerMetadata:
        return WorkerMetadata(type(self).__name__)


class LoaderMetadata(KVConnectorMetadata):
    """Names the request to load in this step, if any."""

    def __init__(self, loading: str | None) -> None:
        self.loading = loading


class Loader(RecordingChild):
    """Loads every request, and has it in the step after its allocation."""

    loading: str | None = None

    def answer_get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return OFFERED_TOKENS, True

    def answer_update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.loading = request.request_id if num_external_tokens else None

    def answer_build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loading, self.loading = self.loading, None
        return LoaderMetadata(loading)

    def answer_get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        meta = self._get_connector_metadata()
        received, meta.loading = {meta.loading} - {None}, None
        return None, received or None


class Saver(RecordingChild):
    """Saves every request, and is done with it when the workers are passed its end."""

    def answer_request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, dict(PARAMS)

    def answer_get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(finished_req_ids) or None, None
