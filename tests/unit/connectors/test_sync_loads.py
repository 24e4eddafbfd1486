"""Who loads synchronously is seen in its class; where vLLM can't recompute that, it is refused or warned of."""

from collections.abc import Mapping
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector, lmcache_connector

from kvobs.connectors.sync_loads import (
    SAFE,
    SEVERAL_GROUPS,
    SEVERAL_STEPS,
    SIBLINGS,
    V2,
    Conditions,
    Danger,
    async_only,
    loads_synchronously,
    unsafe_loads,
)
from kvobs.connectors.validation import Validated, find_classes, validate
from kvobs.schema import config
from kvobs.vllm_api.versions import TransferConfig


class OnlySync:
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if request is None:
            return None, False
        return self.size(request) - computed, False

    def size(self, request: Any) -> int:
        return 0


class InheritsSync(OnlySync):
    pass


class OnlyAsync:
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        if request is None:
            return 0, False
        return computed, True


class Both(OnlySync):
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if request is None:
            return computed, True
        return self.size(request), False


class Delegates(OnlySync):
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, computed)


class Computes(OnlySync):
    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return computed, request is None


class OffloadingConnector:  # vLLM's name: its own lookup delegates
    get_num_new_matched_tokens = Delegates.get_num_new_matched_tokens


@pytest.mark.parametrize(
    ("connector_class", "is_sync"),
    [
        (OnlySync, True),
        (InheritsSync, True),
        (example_connector.ExampleConnector, True),
        (lmcache_connector.LMCacheConnectorV1, True),
        (OnlyAsync, False),
        (OffloadingConnector, False),
        *((cls, None) for cls in (Both, Delegates, Computes, object)),
    ],
)
def test_synchronous_loads_are_seen_in_the_lookup(connector_class: type, is_sync: bool | None) -> None:
    assert loads_synchronously(connector_class) is is_sync


def test_a_class_without_a_source_is_unknown() -> None:
    namespace: dict[str, Any] = {}
    exec(
        "class Generated:\n    def get_num_new_matched_tokens(self, request, computed):\n        return 1, False",
        namespace,
    )
    assert loads_synchronously(namespace["Generated"]) is None


def checked(classes: Mapping[str, tuple[type, str]], conditions: Conditions, **options: Any) -> Validated:
    """Return the validation of connectors of these classes and roles."""
    connectors = [{"kv_connector": name, "kv_role": role} for name, (_, role) in classes.items()]
    validated = validate({"connectors": connectors, "kvobs": options}, "recompute", TransferConfig)
    find_classes(validated, lambda name, module: classes[name][0], conditions=conditions)
    assert validated.mistakes == []
    return validated


GROUPS, V2_RUNNER, STEPS = Conditions(groups=2), Conditions(has_v2_runner=True), Conditions(steps=2)
ALL = Conditions(2, 2, has_v2_runner=True)


@pytest.mark.parametrize("sibling", ["kv_both", "kv_producer", "kv_consumer", None])
@pytest.mark.parametrize(
    ("conditions", "danger"),
    [
        (SAFE, None),
        (GROUPS, SEVERAL_GROUPS),
        (V2_RUNNER, V2),
        (STEPS, SEVERAL_STEPS),
        (V2_RUNNER._replace(steps=3), V2),
        (ALL, SEVERAL_GROUPS),
    ],
)
@pytest.mark.parametrize(
    ("connector_class", "found"),
    [
        (OnlySync, "found 'best', which only offers synchronous loads: its hits are ignored, because "),
        (Delegates, "found 'best', whose synchronous loads, if it makes any, are ignored, because "),
        (OnlyAsync, None),
    ],
)
def test_refused_hits_of_an_isolated_connector_are_a_warning(
    connector_class: type, found: str | None, conditions: Conditions, danger: Danger | None, sibling: str | None
) -> None:
    others = {} if sibling is None else {"other": (OnlyAsync, sibling)}
    validated = checked({"best": (connector_class, "kv_both"), **others}, conditions, best_effort=["best"])
    reason = danger or (SIBLINGS if sibling in ("kv_both", "kv_producer") else None)
    assert async_only(validated.specs, conditions) == ({0} if reason else set())
    assert [warning.found for warning in validated.warnings] == ([found + reason.harm] if found and reason else [])
    for warning in validated.warnings:
        assert warning.path == f"{config.PATH}.kvobs.best_effort"
        assert ("kv_consumer" in warning.fix) == (reason is SIBLINGS)
        assert reason is not None
        assert reason.setting in warning.fix


@pytest.mark.parametrize(
    ("conditions", "danger"), [(SAFE, None), (GROUPS, None), (ALL, None), (V2_RUNNER, V2), (STEPS, SEVERAL_STEPS)]
)
def test_a_synchronous_load_that_is_not_recomputed_is_a_warning(conditions: Conditions, danger: Danger | None) -> None:
    roles = {"sync": OnlySync, "async": OnlyAsync, "unknown": Delegates}
    validated = checked({name: (cls, "kv_both") for name, cls in roles.items()}, conditions)
    found = [f"found 'recompute', and 'sync' loads synchronously: {danger.harm}"] if danger else []
    assert [warning.found for warning in validated.warnings] == found
    assert [warning.fix for warning in validated.warnings] == (
        [f'set it to "fail", or {danger.setting}'] if danger else []
    )
    assert unsafe_loads(validated.specs, conditions, "recompute").keys() == ({0, 2} if danger else set())
    assert unsafe_loads(validated.specs, conditions, "fail") == {}


def test_next_to_an_isolated_connector_isolation_is_advised() -> None:
    """For isolation needs the policy "recompute"."""
    roles = {"sync": (OnlySync, "kv_both"), "best": (OnlyAsync, "kv_both")}
    (warning,) = checked(roles, V2_RUNNER, best_effort=["best"]).warnings
    assert warning.fix.startswith(f"add 'sync' to {config.PATH}.kvobs.best_effort; its hits are then ignored, or start")
    both = checked(roles, V2_RUNNER, best_effort=["best", "sync"])
    assert unsafe_loads(both.specs, V2_RUNNER, "recompute") == {}
