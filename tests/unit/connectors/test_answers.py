"""What an isolated connector may answer is what vLLM accepts, neither more nor less."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvobs.connectors.answers import ANSWERS, NO_ANSWER, MalformedAnswerError, answer_of
from kvobs.testing import BLOCK, Rig, Script
from kvobs.vllm_api.hooks import HOOKS, Combine
from tests.support.rig import entry_for

PROMPT = 4 * BLOCK + 1
LOOKUP = "get_num_new_matched_tokens"
WITHOUT = {
    *("set_host_xfer_buffer_ops", "handle_preemptions", "bind_connector_metadata", "clear_connector_metadata"),
    *("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "on_new_request"),
    *("update_state_after_alloc", "update_connector_output"),
}
"""Hooks that answer nothing, among those with a rule of their own."""
OF_THE_OTHER_SIDE = {"build_connector_meta", "build_connector_worker_meta", "get_kv_connector_kv_cache_events"}
NOT_ASKED = {
    *("build_prom_metrics", "build_kv_connector_stats", "supports_sleep_mode", "prefer_cross_layer_blocks"),
    "consume_prefix_replay_checkpoint",
}  # fmt: skip
"""Hooks that the API server calls, which contains errors, that kvobs does not call, or of which no use is known."""


def test_each_hook_with_an_answer_is_in_the_table() -> None:
    answering = {name for name, hook in HOOKS.items() if hook.combine not in (Combine.EACH, Combine.GUARDED)}
    assert set(ANSWERS) == answering - WITHOUT - OF_THE_OTHER_SIDE - NOT_ASKED
    assert all(answer_of(hook) is NO_ANSWER for hook in WITHOUT | OF_THE_OTHER_SIDE)


@pytest.mark.parametrize("hook", ANSWERS)
def test_nothing_is_an_answer_and_made_anew(hook: str) -> None:
    _, read, nothing = answer_of(hook)
    answer = nothing()
    assert read is None or read(answer, ()) == answer
    assert answer is not nothing() or type(answer) in (bool, tuple, type(None))


def read(answer: Any, *, tokens: int = PROMPT, computed: int = 0) -> Any:
    (_, reader, _) = answer_of(LOOKUP)
    assert reader is not None
    return reader(answer, (SimpleNamespace(num_tokens=tokens), computed))


def is_served(answer: Any) -> bool:
    """Return whether vLLM's own router, and vLLM's scheduler behind it, serve a request with this lookup."""
    script = Script("alone")
    rig = Rig("stock", connectors=[entry_for(script, "OddConnector")])
    script.answers[LOOKUP] = answer
    request = rig.add("r", tokens=PROMPT, max_tokens=2)
    try:
        rig.run(2)
        if rig.status("r") == "WAITING_FOR_REMOTE_KVS":
            script.say(0, received="r")
        rig.run(4)
    except Exception:
        return False
    return list(request.output_token_ids) == [7, 7] and rig.held_blocks == 0


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("tokens", [-1, 0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PROMPT - 1, PROMPT, PROMPT + 1, 10**6])
def test_a_lookup_is_refused_only_where_vllm_does_not_serve_it(tokens: int, is_async: bool) -> None:
    """Whole blocks are not needed, and all of the prompt may be loaded asynchronously."""
    if is_served((tokens, is_async)):
        assert read((tokens, is_async)) == (max(tokens, 0), is_async and tokens > 0)
    else:
        with pytest.raises(ValueError, match="more tokens than the request has"):
            read((tokens, is_async))


@pytest.mark.parametrize("computed", [0, BLOCK])
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_tokens_are_counted_beyond_the_computed_ones(computed: int, kind: Any) -> None:
    left = PROMPT - computed
    assert read((kind(left), 1), computed=computed) == (left, True)
    assert type(read((kind(left), 1), computed=computed)[0]) is int
    for odd in ((kind(left + 1), True), (kind(left), 0)):
        with pytest.raises(ValueError, match="more tokens"):
            read(odd, computed=computed)


def test_the_error_of_an_answer_names_it_and_what_is_allowed() -> None:
    class Nameless:
        def __repr__(self) -> str:
            raise OSError

    assert str(MalformedAnswerError("x" * 10**6, "a number")) == f"returned {'x' * 10**6!r:.100}; allowed: a number"
    assert str(MalformedAnswerError(Nameless(), "a number")) == "returned an object of Nameless; allowed: a number"
