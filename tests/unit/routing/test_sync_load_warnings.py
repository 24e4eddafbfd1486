"""A connector whose class does not show that it loads synchronously is warned of when it does."""

import pytest

from kvobs.testing import BLOCK, Rig, Script
from kvobs.vllm_api.versions import V2_RUNNER

TEXT = "kv_load_failure_policy: found 'recompute', and 'ScriptedConnector' loads synchronously: vLLM's V2 model runner"


@pytest.mark.parametrize("settings", [("1", "recompute"), ("1", "fail"), ("0", "recompute")])
def test_the_first_load_that_is_not_recomputed_is_warned_of(
    a: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: tuple[str, str]
) -> None:
    runner, policy = settings
    monkeypatch.setenv(V2_RUNNER, runner)
    rig = Rig("kvobs", a, policy=policy)
    for request, is_async in (("r", True), ("s", False), ("t", False)):
        a.offers[request] = (2 * BLOCK, is_async)
        rig.add(request)
        rig.step()
        assert caplog.text.count(TEXT) == (settings == ("1", "recompute") and not is_async)
