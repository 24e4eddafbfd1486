"""The configured connectors: their classes and configurations, built, named, and asked about themselves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from kvobs.config import PATH, ConfigError, Configuration, read
from kvobs.gates import Gate
from kvobs.hooks import HOOKS, Cadence, is_empty
from kvobs.notices import line, log
from kvobs.recorder import Call, Recorder
from kvobs.signals import is_timed

# vLLM before 0.30 has no such results: there a child reports bad blocks, or nothing, when a load fails.
try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    KVConnectorTransferResults = None
TransferResults: Any = KVConnectorTransferResults

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

_DATA_PARALLEL_SUFFIX = re.compile(r"_dp\d+$")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One entry of ``connectors``: what will be built."""

    index: int
    name: str
    connector_class: type[KVConnectorBase_V1]
    transfer_config: KVTransferConfig
    is_isolated: bool = False

    def vllm_config(self, parent: VllmConfig) -> VllmConfig:
        """Return vLLM's configuration as this child is to see it: with its own transfer configuration."""
        config = copy.copy(parent)
        config.kv_transfer_config = self.transfer_config
        return config


class Child:
    """One child connector at work, and the recorded calls of its hooks, under the hooks' names.

    ``connector`` is the real object, never wrapped or patched: a call that it makes to itself is not recorded. A hook
    that is provably empty in it is called as it is, or not at all by those who ask ``does``.
    """

    def __init__(
        self,
        index: int,
        name: str,
        connector: Any,
        supports_hma: bool,
        recorder: Recorder,
        *,
        activated: Callable[[Call], Call] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.connector = connector
        self.supports_hma = supports_hma
        self._recorder = recorder
        self._activated = activated
        self.gate = gate

    def __getattr__(self, name: str) -> Call:
        """Bind a hook's recorded call on first use."""
        hook = HOOKS.get(name)
        if hook is None or not is_timed(hook):
            raise AttributeError(f"{name!r} is not a hook that a child is called by")
        call: Call = getattr(self.connector, name)
        if self.does(name):
            call = self._recorder.timed(self.index, name, call)
            if self._activated is not None and hook.cadence is Cadence.REQUEST:
                call = self._activated(call)
        if self.gate is not None:
            call = self.gate.guard(name, call)
        setattr(self, name, call)
        return call

    def layer_call(self, hook: str) -> Call:
        """Return the call of a layer hook, which ``layer_calls`` counts."""
        call: Call = getattr(self.connector, hook)
        return call if self.gate is None else self.gate.guard_layer(hook, call)

    def does(self, hook: str) -> bool:
        """Return whether the child's hook can have any effect, or an answer that is not a constant."""
        return not is_empty(getattr(self.connector, hook))


def specs(parent: KVTransferConfig) -> tuple[ChildSpec, ...]:
    """Read which children ``parent`` configures.

    Raises:
        ConfigError: with every mistake found, each with its JSON path.
    """
    return specs_of(parent, read(parent.kv_connector_extra_config))


def specs_of(parent: KVTransferConfig, configuration: Configuration) -> tuple[ChildSpec, ...]:
    """Do the same where the configuration has been read already."""
    found: list[ChildSpec] = []
    mistakes: list[str] = []
    isolated = configuration.options.isolate
    policy = getattr(parent, "kv_load_failure_policy", None)
    if isolated and policy != "recompute":
        mistakes.append(
            f"kv_load_failure_policy: found {policy!r}, needs 'recompute' beside kv_connector at the top level, since "
            f"{PATH}.kvobs.isolate names connectors whose loads may fail"
        )
    entries = parent.kv_connector_extra_config["connectors"]
    for i, (name, entry) in enumerate(zip(configuration.names, entries, strict=True)):
        try:
            transfer_config = KVTransferConfig(**{**entry, "engine_id": _engine_id(parent, entry)})
            connector_class = KVConnectorFactory.get_connector_class(transfer_config)
        except ValidationError as error:
            details = error.errors(include_input=False, include_url=False)  # what was given may be a secret
            says = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
            mistakes.append(f"{PATH}.connectors[{i}] ({name}): {line(says)}")
        except Exception as error:
            mistakes.append(f"{PATH}.connectors[{i}] ({name}): {type(error).__name__}: {error}")
        else:
            found.append(ChildSpec(i, name, connector_class, transfer_config, name in isolated))
    if mistakes:
        raise ConfigError(mistakes)
    return tuple(found)


def _engine_id(parent: KVTransferConfig, entry: Mapping[str, Any]) -> str | None:
    """Return the child's own engine id with the parent's data-parallel suffix, else the parent's."""
    own = entry.get("engine_id")
    if own is None:
        return parent.engine_id
    suffix = _DATA_PARALLEL_SUFFIX.search(parent.engine_id or "")
    return own if suffix is None or own.endswith(suffix[0]) else own + suffix[0]


def build(
    vllm_config: VllmConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
    of: Sequence[ChildSpec],
    recorder: Recorder,
    *,
    activated: Callable[[Call], Call] | None = None,
) -> tuple[Child, ...]:
    """Build the children; when one can't be built, shut down those that were before its error goes on.

    ``activated`` wraps calls about a request, so that the request's trace context is current in them.
    """
    built: list[Child] = []
    try:
        for spec in of:
            connector = spec.connector_class(spec.vllm_config(vllm_config), role, kv_cache_config)
            gate = Gate(spec.index, recorder, **no_results()) if spec.is_isolated else None
            supports = supports_hma(connector)
            built.append(Child(spec.index, spec.name, connector, supports, recorder, activated=activated, gate=gate))
        for child in built:
            _refuse_isolation_of_what_must_deliver(child)
    except BaseException as error:
        if len(built) < len(of):
            error.add_note(f"while building connector {of[len(built)].name!r}, {PATH}.connectors[{len(built)}]")
        for child in built:
            try:
                child.connector.shutdown()
            except Exception:
                log.exception("connector %r failed to shut down after a sibling could not be built", child.name)
        raise
    return tuple(built)


def no_results() -> dict[str, Callable[[], Any]]:
    """Return what stands for "no results" in this vLLM."""
    return {} if TransferResults is None else {"get_transfer_results": TransferResults}


def _refuse_isolation_of_what_must_deliver(child: Child) -> None:
    if child.gate is not None and getattr(child.connector, "requires_kv_delivery", False):
        raise ConfigError([
            f"{PATH}.kvobs.isolate: found {child.name!r}, which must deliver what it saves (requires_kv_delivery) and "
            "can't be left out. That is so with kv_role kv_producer or kv_both, unless its class says otherwise; "
            "allowed: best-effort caches, or kv_role kv_consumer"
        ])  # fmt: skip


def all_support_hma(of: Iterable[ChildSpec]) -> bool:
    """Return whether there are children and every one supports the hybrid memory allocator."""
    support = [KVConnectorFactory.supports_hma_config(spec.transfer_config) for spec in of]
    return bool(support) and all(support)


def required_layout(vllm_config: VllmConfig, of: Iterable[ChildSpec]) -> str | None:
    """Return the KV cache layout that the children need (such as "HND"), or None when any will do.

    Raises:
        ValueError: when they disagree; names each child and its layout.
    """
    needs = {spec.name: spec.connector_class.get_required_kvcache_layout(spec.vllm_config(vllm_config)) for spec in of}
    stated = {name: layout for name, layout in needs.items() if layout is not None}
    if len(set(stated.values())) > 1:
        listed = ", ".join(f"{name} needs {layout}" for name, layout in stated.items())
        raise ValueError(
            f"the KV cache has one layout, and the connectors disagree: {listed}. "
            f"Remove one of them from {PATH}.connectors, or configure them for the same layout"
        )
    return next(iter(stated.values()), None)


def warn_about(parent: KVTransferConfig, of: Iterable[ChildSpec]) -> None:
    """Log what is configured on a child and has no effect there."""
    entries = parent.kv_connector_extra_config["connectors"]
    effective = getattr(parent, "kv_load_failure_policy", None)
    for spec in of:
        own = entries[spec.index].get("kv_load_failure_policy")
        if own is not None and own != effective:
            log.warning(
                "%s.connectors[%d].kv_load_failure_policy is %r on connector %r and has no effect: vLLM reads the top "
                "level only, where it is %r. Set it beside kv_connector at the top level",
                PATH,
                spec.index,
                own,
                spec.name,
                effective,
            )
