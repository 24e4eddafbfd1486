"""Check what the connectors' classes are, without building connectors: by their source, or by an import of vLLM."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvobs.cli.check import vllm_source
from kvobs.cli.check.result import CheckResult, Facts
from kvobs.connectors import validation
from kvobs.connectors.known import ROUTER
from kvobs.connectors.specs import hands_over, name_among
from kvobs.connectors.validation import NotUsableError
from kvobs.log import line
from kvobs.schema import kinds
from kvobs.schema.config import ENABLE_VARIABLE
from kvobs.schema.findings import show

_MODULE = "kv_connector_module_path"
_LAYOUT, _PIECEWISE, _SLEEP = "get_required_kvcache_layout", "requires_piecewise_for_cudagraph", "supports_sleep_mode"
_APART = ("NixlPushConnector",)  # no other class of its base can take its KV
Finder = Callable[[str, Any], type]


def check_classes(result: CheckResult, *, is_deep: bool = False) -> None:
    """Add the properties and errors of the connectors' classes to a checked text; nothing without vLLM.

    They are read from the source; with ``is_deep`` vLLM and the classes are imported.
    """
    validated = result.validated
    class_of = None if result.vllm is None else _imported(result) if is_deep else vllm_source.finder()
    if class_of is None or validated is None or not validated.entries:
        return
    validation.find_classes(validated, class_of, conditions=result.conditions)
    own = {validation.path_of(i) for i, (_, entry) in validated.entries.items() if not entry.get(_MODULE)}
    made = {f"{path}.kv_connector" for path in own}  # one of vLLM's may be made by its module
    result.add(*(each for each in validated.mistakes if each.kind is not kinds.NOT_READ or each.path not in made))
    result.add(*validated.warnings)
    _find_facts(result, validated, is_deep=is_deep)
    _check_layouts(result)
    _note_what_is_off(result)


def _imported(result: CheckResult) -> Finder | None:
    """Import vLLM and its plugins, and return what finds a class; None, and a warning, if that fails."""
    try:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from kvobs.connectors.configured import class_of
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {line(error, 300)}"
        result.off["classes"] = f"vLLM can't be imported here: {reason}"
        result.add(kinds.NO_VLLM.at("vLLM", reason=reason))
        return None
    theirs = class_of(ROUTER, None)
    if result.by_variable and not theirs.__module__.startswith(("kvobs.", "vllm.")):
        path = f"{theirs.__module__}.{theirs.__name__}"
        result.add(kinds.OTHER_PLUGIN.at(f"environment variable {ENABLE_VARIABLE}", path=path))
    return class_of


def _find_facts(result: CheckResult, validated: validation.Validated, *, is_deep: bool) -> None:
    connectors = dict(zip(validated.entries, result.connectors, strict=True))
    has_hisparse = any(connector.kv_connector == "HiSparseConnector" for connector in result.connectors)
    for spec in validated.specs:
        if hands_over(spec.connector_class):
            bases = [base.__name__ for base in spec.connector_class.__mro__]
            apart = name_among(spec.connector_class, _APART)
            connectors[spec.index].hands_over = apart or bases[bases.index("KVConnectorBase_V1") - 1]
        transfer, path = spec.transfer_config, validation.path_of(spec.index)
        if is_deep:
            from vllm.config import KVTransferConfig

            entry = validated.entries[spec.index][1]
            transfer, mistakes = validation.transfer_config(entry, path, KVTransferConfig)
            result.add(*mistakes)
        if transfer is not None:
            try:
                facts = facts_of(spec.connector_class, transfer, has_hisparse=has_hisparse)
            except NotUsableError as error:
                result.add(error.at(path))
            else:
                connectors[spec.index].facts = facts


def _note_what_is_off(result: CheckResult) -> None:
    for feature, fact, problem, effect in (
        ("hybrid KV cache manager", "supports_hma", False, _WITHOUT_HYBRID),
        ("sleep mode", "supports_sleep_mode", False, ""),
        ("full CUDA graphs", "requires_piecewise", True, ""),
    ):
        lacking = [each.name for each in result.connectors if each.facts and getattr(each.facts, fact) is problem]
        if lacking:
            result.off[feature] = f"not supported by {', '.join(lacking)}{effect}"
    # Model runners of other platforms may call them.
    methods = {each.name: each.facts.other_methods for each in result.connectors if each.facts is not None}
    if listed := "; ".join(f"{name}: {', '.join(names)}" for name, names in methods.items() if names):
        result.off["other methods"] = f"no hooks of vLLM: kvobs passes calls on, and does not record them ({listed})"


_WITHOUT_HYBRID = (
    ": with it a model with sliding windows or Mamba keeps fewer tokens, half and less (vLLM's log, GPU KV cache size)"
)


def _check_layouts(result: CheckResult) -> None:
    """Check that the connectors need one layout, for models with and without MLA."""
    clashes = {}
    for is_mla, words in enumerate(("without", "with")):
        needs = {each.name: each.facts.layouts[is_mla] for each in result.connectors if each.facts}
        clashes[words] = validation.clashing_layouts({name: need for name, need in needs.items() if need != "unknown"})
    if all(clashes.values()):
        result.add(*clashes["without"])
        return
    for words, clashing in clashes.items():
        result.add(*(kinds.LAYOUTS_OF_SOME.at(each.path, models=words, found=each.found) for each in clashing))


def facts_of(cls: Any, transfer: Any, *, has_hisparse: bool) -> Facts:
    """Read the properties of a connector class; ``NotUsableError`` if it can't be used, or one of its methods raises.

    ``has_hisparse`` is whether the same engine has a HiSparseConnector.
    """
    if not name_among(cls, ("KVConnectorBase_V1",)):
        raise NotUsableError(kinds.NO_KV_CONNECTOR.at("", name=show(transfer.kv_connector)))
    layout, piecewise, sleep = (getattr(cls, name, None) for name in (_LAYOUT, _PIECEWISE, _SLEEP))
    extra, path = transfer.kv_connector_extra_config, f"{cls.__module__}.{cls.__qualname__}"
    has_hma = name_among(cls, ("SupportsHMA",)) is not None
    if isinstance(layout, ast.AST):
        plain, mla = (vllm_source.layout(layout, has_hisparse=has_hisparse, is_mla=is_mla) for is_mla in (False, True))
        answers = vllm_source.answer(sleep, extra), vllm_source.answer(piecewise, extra)
        return Facts(path, has_hma, *answers, (plain, mla))
    from kvobs.connectors.fanout import own_methods

    can_sleep = None if sleep is None else _answer(_SLEEP, sleep, transfer)
    plain, mla = (_layout(cls, transfer, has_hisparse, is_mla) for is_mla in (False, True))
    return Facts(path, has_hma, can_sleep, _answer(_PIECEWISE, piecewise, extra), (plain, mla), own_methods(cls))


def _answer(hook: str, ask: Any, given: Any) -> bool:
    try:
        return bool(ask(given))
    except Exception as error:
        raised = f"{type(error).__name__}: {line(error, 400)}"
        raise NotUsableError(kinds.RAISES.at("", hook=hook, error=raised)) from error


def _layout(cls: Any, transfer: Any, has_hisparse: bool, is_mla: bool) -> str | None:
    """Return the layout that the class needs, given the parts of vLLM's configuration that vLLM's classes read."""
    vllm_config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(use_mla=is_mla),
        attention_config=SimpleNamespace(hisparse_config=object() if has_hisparse else None),
    )
    try:
        layout = cls.get_required_kvcache_layout(vllm_config)
    except Exception:
        return "unknown"
    return layout if layout is None else str(layout)
