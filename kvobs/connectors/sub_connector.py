"""One connector at work: built, and each of its hooks bound to a recorded call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvobs.connectors.answers import read_layout
from kvobs.connectors.endings import must_pass
from kvobs.connectors.gate import Gate
from kvobs.connectors.kv_events import KvEvents, evicts
from kvobs.connectors.specs import ConnectorSpec
from kvobs.log import line, log
from kvobs.page.writer import STOPS
from kvobs.probe.layer_calls import ARGUMENTS, LayerCall
from kvobs.probe.pure import Call
from kvobs.probe.recorder import Recorder
from kvobs.schema.config import PATH
from kvobs.schema.signals import TIMED
from kvobs.state.cache_layout import full_group
from kvobs.vllm_api.hooks import Cadence, Combine, Hook, Side, is_empty

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Hooks of vLLM's base class that call another hook, which a connector may implement.
CALLS_ANOTHER = {"get_transfer_results"}
# The base class's answers to the other hooks of each step: timing one would cost more than it takes.
UNTIMED = frozenset(
    function
    for name, function in vars(KVConnectorBase_V1).items()
    if name in TIMED and TIMED[name].cadence is Cadence.STEP and name not in CALLS_ANOTHER
)


@dataclass(eq=False, repr=False)
class SubConnector:
    """One built connector, with a recorded call for each of its hooks except layer hooks, under the hook's name.

    ``wrapped`` is the real object, which is never patched: calls that it makes to itself are not recorded. A hook
    that it does not implement is called unrecorded, or skipped by callers that look into ``implemented``.
    """

    index: int
    name: str
    wrapped: Any
    recorder: Recorder
    activated: Callable[[Call], Call] | None = None
    gate: Gate | None = None
    sides: Collection[Side] = tuple(Side)
    """The sides whose hooks are called."""
    full_group: int = 0
    """The KV cache group whose layers keep all tokens."""

    def __post_init__(self) -> None:
        self._bound: dict[str, Call] = {}
        known = evicts(type(self.wrapped))
        self.kv_events = KvEvents(self.recorder, self.index, group=self.full_group, evicts=known)
        self.implemented: frozenset[str] = frozenset()
        """The hooks that it implements: they have an effect, or an answer that is not a constant."""
        self.bind()

    def bind(self) -> bool:
        """Bind the hooks to the connector's methods as they are now; return whether any has changed.

        A plug-in may replace methods after the connector was built, on the object or on its class.
        """
        names = [name for name, hook in TIMED.items() if hook.side in self.sides and hasattr(self.wrapped, name)]
        methods = {name: getattr(self.wrapped, name) for name in names}
        if methods == self._bound:
            return False
        self._bound = methods
        self.implemented = frozenset([name for name, method in methods.items() if not is_empty(method)])
        for name, method in methods.items():
            if name not in ARGUMENTS:
                setattr(self, name, self._wrapped(TIMED[name], method))
        return True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Call:
            """Return a hook's call."""

    def _wrapped(self, hook: Hook, method: Call) -> Call:
        """Return a hook's call in all that surrounds it, from the inside: drained, recorded, in its trace, guarded."""
        call = method
        if hook.combine is Combine.CHAIN:
            call = partial(_drained, method, self.kv_events)
        elif hook.name == "reset_cache":
            call = partial(_reset, method, self.kv_events)
        if hook.name in self.implemented and getattr(method, "__func__", None) not in UNTIMED:
            call = self.recorder.timed(self.index, hook.name, call)
            if self.activated is not None and hook.cadence is Cadence.REQUEST:
                call = self.activated(call)
        return call if self.gate is None else self.gate.guard(hook.name, call)

    def ask(self, name: str) -> Any:
        """Return the value of a property."""
        ask = partial(getattr, self.wrapped, name)
        return ask() if self.gate is None else self.gate.guard(name, ask)()

    def layer_target(self, hook: str) -> LayerCall:
        """Return the unrecorded call of a layer hook, for the fan-out that counts it."""
        call: Call = getattr(self.wrapped, hook)
        return LayerCall(self.index, call if self.gate is None else self.gate.guard_layer(hook, call))


def _drained(call: Call, kv_events: KvEvents, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return all items of a generator, so that its errors and its time belong to the call; count them, if any."""
    items = tuple(call(*args, **kwargs) or ())
    if items or kv_events.was_reset:
        kv_events.count(items)
    return items


def _reset(call: Call, kv_events: KvEvents, *args: Any, **kwargs: Any) -> Any:
    """Return a connector's answer to a reset, after noting that it is empty."""
    answer = call(*args, **kwargs)
    if answer is True:
        kv_events.reset()
    return answer


class Unbuilt(KVConnectorBase_V1, SupportsHMA):
    """Replaces an isolated connector that could not be built: it does nothing until a restart."""

    supports_divergent_local_hybrid_hits = True  # the other connectors' answers count
    requires_kv_delivery = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def build(
    vllm_config: VllmConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
    specs: Sequence[ConnectorSpec],
    recorder: Recorder,
    *,
    activated: Callable[[Call], Call] | None = None,
) -> tuple[SubConnector, ...]:
    """Build the connectors; if one can't be built, shut down the others and raise its error.

    ``activated`` wraps calls about a request to make the request's trace context current.
    """
    built: list[SubConnector] = []
    group = full_group(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else 0
    sides = Side.BOTH, Side.SCHEDULER if role.name == "SCHEDULER" else Side.WORKER
    try:
        for spec in specs:
            connector = _build_one(spec, vllm_config, role, kv_cache_config)
            gate = Gate(spec.index, recorder) if spec.is_best_effort else None
            built.append(SubConnector(spec.index, spec.name, connector, recorder, activated, gate, sides, group))
    except BaseException as error:
        error.add_note(f"while building connector {specs[len(built)].name!r}, {PATH}.connectors[{len(built)}]")
        shut_down(built)
        raise
    return tuple(built)


def shut_down(connectors: Sequence[SubConnector]) -> None:
    """End the connectors of a start that has failed, and log what they raise."""
    for connector in connectors:
        try:
            connector.wrapped.shutdown()
        except STOPS:
            raise
        except BaseException:
            log.exception("connector %r failed to shut down after the start had failed", connector.name)


def _build_one(
    spec: ConnectorSpec, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
) -> KVConnectorBase_V1:
    config = spec.vllm_config(vllm_config)
    try:
        if spec.is_best_effort:  # one that can't be asked gets any layout: it would save and load something else
            read_layout(spec.connector_class.get_required_kvcache_layout(config))
        return spec.connector_class(config, role, kv_cache_config)
    except BaseException as error:
        if not spec.is_best_effort or must_pass(error):
            raise
        text = "best-effort connector %r can't be built (%s: %s). Requests are served without it until a restart"
        log.error(text, spec.name, type(error).__name__, line(error))
        return Unbuilt(spec.vllm_config(vllm_config), role, kv_cache_config)
