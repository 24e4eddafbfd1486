"""Read the configured connectors from vLLM's configuration, with properties that vLLM asks for at once."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.connectors import known
from kvobs.connectors.answers import answer_of
from kvobs.connectors.endings import must_pass
from kvobs.connectors.specs import ConnectorSpec
from kvobs.connectors.sub_connector import Unbuilt
from kvobs.connectors.sync_loads import SAFE, Conditions
from kvobs.connectors.validation import (
    NotUsableError,
    Validated,
    clashing_layouts,
    find_classes,
    not_registered,
    validate,
)
from kvobs.log import line, log, once
from kvobs.schema import kinds
from kvobs.schema.config import ConfigError
from kvobs.schema.findings import show

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def read(parent: KVTransferConfig, conditions: Conditions = SAFE) -> Validated:
    """Return the options and the connectors that ``parent`` configures.

    It warns of synchronous loads that are not used, or not safe, under these conditions.

    Raises:
        ConfigError: with every error found, each with its JSON path.
    """
    policy = getattr(parent, "kv_load_failure_policy", None)
    checked = validate(parent.kv_connector_extra_config, policy, KVTransferConfig, engine_id=parent.engine_id)
    find_classes(checked, class_of, Unbuilt, conditions=conditions)
    if checked.mistakes:
        raise ConfigError(checked.mistakes)
    for name, problem in checked.absent.items():
        log.error("best-effort connector %r can't be imported. Serving starts without it. %s", name, problem)
    return checked


def read_specs(parent: KVTransferConfig) -> tuple[ConnectorSpec, ...]:
    """Return the connectors that ``parent`` configures; raise ``ConfigError`` as ``read`` does."""
    return tuple(read(parent).specs)


def class_of(name: str, module: Any) -> type:
    """Return a connector's class, as vLLM finds it.

    Raises:
        NotUsableError: it can't be imported, or is not a class.
    """
    entry: Any = SimpleNamespace(kv_connector=name, kv_connector_module_path=module)
    try:
        connector_class = KVConnectorFactory.get_connector_class(entry)
    except BaseException as error:
        if must_pass(error):
            raise
        registered = sorted(getattr(KVConnectorFactory, "_registry", ()))
        if module is None and name not in registered:
            raise not_registered(name, registered) from error
        fix = _fix_of_import(name, module, error)
        finding = kinds.NO_IMPORT.at("", fix=fix, name=show(name), error=named(error))
        raise NotUsableError(finding, is_import=not _is_of_factory(error)) from error
    if not inspect.isclass(connector_class):
        raise NotUsableError(kinds.NO_CLASS.at("", name=show(name)))
    return connector_class


def _fix_of_import(name: str, module: Any, error: BaseException) -> str:
    if module in known.OURS:
        return f"use {known.ROUTER!r}, the class of kv_connector_module_path {module!r}"
    if lacking := known.missing_libraries(name) if module is None else []:
        return "; ".join(f"{need.modules[0]}: {need.install}" for need in lacking)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if isinstance(module, str) and missing and f"{module}.".startswith(f"{missing}."):
        return f"correct kv_connector_module_path, or install the package that has the module {missing!r}"
    if missing:
        return f"install the package that has the module {missing!r} in this environment"
    if isinstance(error.__cause__, AttributeError) and error.__cause__.name == name:
        return "correct kv_connector, or kv_connector_module_path: that module has no such class"
    return "correct kv_connector_module_path, or the class's own module, as the error shows"


def _is_of_factory(error: BaseException) -> bool:
    """Return whether vLLM's factory itself has raised: the module was imported, but its class is not a connector."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") == KVConnectorFactory.__module__


def named(error: BaseException) -> str:
    """Return an error's class and text in one line."""
    return f"{type(error).__name__}: {line(error, 400)}"


def all_support_hma(of: Iterable[ConnectorSpec]) -> bool:
    """Return whether all connectors (at least one) support the hybrid memory allocator."""
    support = [
        spec.connector_class is Unbuilt or KVConnectorFactory.supports_hma_config(spec.transfer_config) for spec in of
    ]
    return bool(support) and all(support)


def ask(spec: ConnectorSpec, hook: str, *args: Any) -> Any:
    """Return the answer of a connector's class; an isolated one that fails answers what has no effect."""
    _, read, nothing = answer_of(hook)
    try:
        answer = getattr(spec.connector_class, hook)(*args)
        return read(answer, args) if spec.is_best_effort and read is not None else answer
    except BaseException as error:
        if not spec.is_best_effort or must_pass(error):
            raise
        text = "best-effort connector %r failed in %s (%s). Startup continues"
        once(f"ask:{spec.name}:{hook}", logging.WARNING, text, spec.name, hook, named(error))
        return nothing()


def required_layout(vllm_config: VllmConfig, of: Iterable[ConnectorSpec]) -> str | None:
    """Return the KV cache layout that the connectors need (such as "HND"), or None if any will do.

    Raises:
        ConfigError: when they disagree; names each connector and its layout.
    """
    needs = {spec.name: ask(spec, "get_required_kvcache_layout", spec.vllm_config(vllm_config)) for spec in of}
    if clashes := clashing_layouts(needs):
        raise ConfigError(clashes)
    return next((layout for layout in needs.values() if layout is not None), None)
