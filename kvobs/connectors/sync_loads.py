"""Synchronous loads: which connectors make them, and what vLLM does after one that failed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from kvobs.connectors.specs import ConnectorSpec, why_not_isolated
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding
from kvobs.vllm_api import versions

ASYNC_ONLY = frozenset(
    {
        "HF3FSKVConnector",
        "LMCacheMPConnector",
        "MooncakeStoreConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""Connector classes of vLLM that only ever offer asynchronous loads, which is not seen in their own lookup."""


class Conditions(NamedTuple):
    """The properties of an engine that decide whether it can recompute a failed synchronous load."""

    groups: int = 1  # KV cache groups
    steps: int = 1  # steps that may be in flight
    has_v2_runner: bool = False


SAFE = Conditions()
"""One KV cache group, one step at a time, and the V1 runner: vLLM recomputes the lost tokens."""


class Danger(NamedTuple):
    """The harm of a failed synchronous load under some condition, and the setting of vLLM without it."""

    harm: str
    setting: str = ""


SEVERAL_GROUPS = Danger("with several KV cache groups a failed load can't be reported")
V2 = Danger(
    "vLLM's V2 model runner does not recompute a failed load: it continues with wrong KV and reports no error",
    f"start vLLM with {versions.V2_RUNNER}=0 and --no-async-scheduling",
)
SEVERAL_STEPS = Danger(
    "with several steps in flight, a step after a failed load computes on its unfilled blocks",
    "start vLLM with --no-async-scheduling and without pipeline parallelism",
)
SIBLINGS = Danger("after a failed load other connectors would save unfilled blocks")


def danger(conditions: Conditions) -> Danger | None:
    """Return why vLLM can't recompute a failed synchronous load; None if it can."""
    if conditions.groups > 1:
        return SEVERAL_GROUPS
    if conditions.has_v2_runner:
        return V2
    return SEVERAL_STEPS if conditions.steps > 1 else None


def loads_synchronously(connector_class: type) -> bool | None:
    """Return whether a class offers synchronous loads: only such (True), none (False), or unknown (None).

    It is read from the answers in the source of its lookup: ``return tokens, False``.
    """
    if connector_class.__name__ in ASYNC_ONLY:  # a subclass may differ
        return False
    try:
        lookup = connector_class.get_num_new_matched_tokens  # type: ignore[attr-defined]
        if not isinstance(lookup, ast.AST):  # it is where a class stands for its source
            lookup = ast.parse(textwrap.dedent(inspect.getsource(lookup)))
        answers = set(_answers(lookup))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return None
    return not answers.pop() if len(answers) == 1 and None not in answers else None


def _answers(lookup: ast.AST) -> Iterator[bool | None]:
    """Yield whether each hit that a lookup returns is asynchronous, None if the source does not show it."""
    for node in ast.walk(lookup):
        if not isinstance(node, ast.Return):
            continue
        match node.value:
            case ast.Tuple(elts=[ast.Constant(), _]):  # no tokens, or not yet
                continue
            case ast.Tuple(elts=[_, ast.Constant(value=bool(is_async))]):
                yield is_async
            case _:
                yield None


def async_only(of: Sequence[ConnectorSpec], conditions: Conditions) -> frozenset[int]:
    """Return the isolated connectors whose synchronous offers are not used.

    If such a load fails, vLLM does not recompute it rightly, or other connectors may have saved its unfilled blocks.
    """
    savers = {spec.index for spec in of if spec.transfer_config.kv_role != "kv_consumer"}
    is_unsafe = danger(conditions) is not None
    return frozenset(spec.index for spec in of if spec.is_best_effort and (is_unsafe or savers - {spec.index}))


def unused_offers(of: Sequence[ConnectorSpec], conditions: Conditions, refused: Container[int]) -> Iterator[Finding]:
    """Warn about isolated connectors whose synchronous loads are ``refused``, unless they make none."""
    why = danger(conditions) or SIBLINGS
    other = "give the other connectors kv_role kv_consumer" if why is SIBLINGS else why.setting
    fix = f"remove it from the list, or {other}" if other else "remove it from the list"
    for spec in of:
        if spec.index not in refused or why_not_isolated(spec) is not None:
            continue
        is_sync = loads_synchronously(spec.connector_class)
        if is_sync is not False:
            hits = (
                "which only offers synchronous loads: its hits are ignored"
                if is_sync
                else "whose synchronous loads, if it makes any, are ignored"
            )
            cure = fix if is_sync else f"if it makes any, {fix}"
            yield kinds.UNUSED_OFFERS.at(
                f"{PATH}.kvobs.best_effort", fix=cure, name=spec.name, hits=hits, harm=why.harm
            )


def unsafe_loads(of: Sequence[ConnectorSpec], conditions: Conditions, policy: object) -> dict[int, Finding]:
    """Return the warnings about connectors that may load synchronously where a failed load is not recomputed rightly.

    They are by the connector's position. ``policy`` is vLLM's ``kv_load_failure_policy``. Isolation needs "recompute",
    and such loads of isolated connectors are not used.
    """
    why = danger(conditions)
    if policy != "recompute" or why is None or why is SEVERAL_GROUPS:  # with several groups the engine ends
        return {}
    isolates = any(spec.is_best_effort for spec in of)
    warnings = {}
    for spec in of:
        if not spec.is_best_effort and loads_synchronously(spec.connector_class) is not False:
            instead = 'set it to "fail"'
            if isolates:
                instead = f"add {spec.name!r} to {PATH}.kvobs.best_effort; its hits are then ignored"
            fix = f"{instead}, or {why.setting}"
            warnings[spec.index] = kinds.NOT_RECOMPUTED.at(
                "kv_load_failure_policy", fix=fix, name=spec.name, harm=why.harm
            )
    return warnings
