"""What a test needs to know of one connector: its configuration, the stand-in for its wire, and its books."""

import random
from collections.abc import Container, Sequence
from typing import Any, ClassVar, Self

from tests.connectors.memory import BLOCK, Memory, Truth


class Plug:
    """One connector; a subclass stands in for its wire in ``install``, which runs before the connector is built."""

    connector = ""  # vLLM's name of its class
    role = "kv_both"
    is_a_lie = False  # what it loads is made up, on purpose
    by_tag: ClassVar[dict[str, Any]] = {}  # for stand-ins that know a configuration only

    def __init__(self, name: str = "", seed: int = 0, fail_rate: float = 0.0) -> None:
        self.name = name or type(self).__name__.lower()
        self.random = random.Random(f"{self.name} {seed}")
        self.fail_rate = fail_rate
        self.now = 0  # steps
        self.on_scheduler: Any = None  # on the scheduler's side
        self.workers: dict[int, Any] = {}
        self.memories: dict[int, Memory] = {}
        self.truth = Truth()
        self.wrong_stores: list[str] = []
        self.stored = 0  # blocks that were compared
        self.loaded = 0
        self.cleared = 0  # how often the store was asked to delete what it holds
        self.by_tag[self.tag] = self

    @property
    def tag(self) -> str:
        return self.name

    def options(self) -> dict[str, Any]:
        return {"tag": self.tag}

    def config(self) -> dict[str, Any]:
        return {"kv_connector": self.connector, "kv_role": self.role, "kv_connector_extra_config": self.options()}

    @classmethod
    def of(cls, vllm_config: Any, option: str = "tag") -> Self:
        plug: Self = cls.by_tag[vllm_config.kv_transfer_config.get_from_extra_config(option, "")]
        return plug

    def install(self, patch: Any) -> None:
        """Put the stand-ins in place."""

    def attach_worker(self, connector: Any, memory: Memory, truth: Truth, rank: int) -> None:
        """Take a worker's side, before its KV caches are registered."""
        self.workers[rank], self.memories[rank], self.truth = connector, memory, truth

    def attach_scheduler(self, connector: Any) -> None:
        self.on_scheduler = connector

    def tick(self) -> None:
        self.now += 1

    def delay(self) -> int:
        """Return how many steps something takes."""
        return self.random.choice((0, 1, 1, 2, 4))

    def may_fail(self, call: str) -> None:
        """Raise if the wire is to fail in this call."""

    def leftovers(self) -> list[str]:
        """Return what is left in the connector's own books, and in its store's, when the engine is idle."""
        return []

    def check_store(self, page_is_right: bool, what: str) -> None:
        """Count a store, and note it if it is wrong."""
        self.stored += 1
        if not page_is_right:
            self.wrong_stores.append(f"step {self.now}: {what}")


class Idle:
    """What stands in for a worker, or for a library in it, has in common: nothing happens."""

    def __init__(self, *_: Any) -> None:
        """Connect to nothing."""

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
    register_kv_caches = set_host_xfer_buffer_ops = shutdown = start_load_kv

    def get_finished(self, *_: Any) -> tuple[Any, Any]:
        return None, None

    def take_events(self) -> list[Any]:
        return []

    def get_kv_connector_stats(self) -> None:
        return None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class Wire(Idle):
    """The workers of connectors that hand KV over."""

    plug: Any
    use_host_buffer = False
    copy_blocks = None
    pcp_rank = 0
    pcp_dcp_sharded = False
    xfer_handshake_metadata = None

    def get_transfer_results(self) -> Any:
        return self.plug.results()


def entries(owner: Any, *books: str) -> list[str]:
    """Return what these books of a part of a connector hold."""
    return [f"{book}: {entry}" for book in books for entry in getattr(owner, book)]


def held(pages: Container[tuple[int, ...]], tokens: Sequence[int], begin: int = 0, step: int = BLOCK) -> int:
    """Return up to which token there are pages, by all tokens up to their end, from a token on."""
    end = begin
    while end + step <= len(tokens) and tuple(tokens[: end + step]) in pages:
        end += step
    return end
