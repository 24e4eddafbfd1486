"""The table of differences between kvobs and vLLM's own MultiConnector that connectors can see.

The differential test (``tests/transparency``) accepts exactly these differences, by name; the table in
``docs/architecture.md`` is generated from it.
"""

from dataclasses import dataclass

from kvobs.vllm_api.hooks import HOOKS, Cadence, Side


@dataclass(frozen=True, slots=True)
class Deviation:
    """One intended difference.

    Args:
        name: the key used by tests.
        hooks: the hooks, as in ``kvobs.vllm_api.hooks.HOOKS``, in which a connector can see it.
        differs: the difference from vLLM's own MultiConnector.
        why: the reason.
        unasked: what happens if a connector does it although it was not chosen, or asked.
        test: pytest's id of the test that proves it.
    """

    name: str
    hooks: tuple[str, ...]
    differs: str
    why: str
    unasked: str
    test: str


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        name="empty-hooks-not-called",
        hooks=(
            "register_kv_caches",
            "reset_capture_state",
            "start_load_kv",
            "wait_for_layer_load",
            "save_kv_layer",
            "finish_forward",
            "wait_for_save",
            "set_host_xfer_buffer_ops",
            "get_kv_connector_kv_cache_events",
            "update_connector_output",
            "bind_gpu_block_pool",
        ),
        differs="A hook that a connector's class does not implement (its body provably does nothing) is not called.",
        why="The call has no effect, and most connectors do not implement the per-layer hooks.",
        unasked="Nothing: a hook whose body does nothing has no effect whoever calls it.",
        test="tests/transparency/test_declared.py::test_empty_hooks_are_not_called",
    ),
    Deviation(
        name="hooks-bound-at-the-first-step",
        hooks=tuple(
            name
            for name, hook in HOOKS.items()
            if hook.side is not Side.CONFIG and hook.cadence is not Cadence.ONCE and not hook.is_property
        ),
        differs="A hook that is replaced on a connector or its class after the engine's first step is not called: the "
        "one before is.",
        why="Looking hooks up again would cost more than most calls do; plug-ins replace them before the first step.",
        unasked="A plug-in that replaces hooks of each step later is bypassed: it must do so before the first step.",
        test="tests/transparency/test_declared.py::test_a_hook_replaced_after_the_first_step_is_not_called",
    ),
    Deviation(
        name="handshakes-go-home",
        hooks=("get_handshake_metadata", "set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware"),
        differs="Every connector is asked for its handshake, and gets only its ranks' handshakes.",
        why="vLLM's own class keeps the first connector's handshake only and hands it to all connectors.",
        unasked="A connector without handshakes of its ranks is not called with another connector's handshakes.",
        test="tests/unit/routing/test_stock_faults.py::test_w10_each_connector_gets_its_own_handshake_back",
    ),
    Deviation(
        name="worker-events-collected",
        hooks=("get_kv_connector_kv_cache_events", "update_connector_output"),
        differs="KV cache events of the workers are collected, and each connector finds its own in the output.",
        why="vLLM's own class never collects them: they are lost.",
        unasked="Events of a connector that was not chosen count: they report blocks that it has stored.",
        test="tests/unit/routing/test_stock_faults.py::test_w13_kv_cache_events_reach_the_connector_that_made_them",
    ),
    Deviation(
        name="own-stats-shown",
        hooks=("update_connector_output",),
        differs="A connector finds its own stats or None in the output's kv_connector_stats, not all stats.",
        why="A connector that runs alone also finds its own; some raise on stats of another class, or miss theirs.",
        unasked="A connector that looks for another one's stats does not find them, as when it runs alone.",
        test="tests/unit/routing/test_stock_faults.py::test_w22_each_connector_is_shown_its_own_stats",
    ),
    Deviation(
        name="empty-outputs-shown",
        hooks=("update_connector_output",),
        differs="With the worker in the scheduler's process, connectors get an output in which only KV events are.",
        why="vLLM omits an empty output there; with the events of a worker, which are collected, it is not empty.",
        unasked="Nothing: the output has no report in it.",
        test="tests/transparency/test_declared.py::test_an_output_with_nothing_but_a_workers_events_is_shown",
    ),
    Deviation(
        name="finished-counts-by-connector",
        hooks=("get_finished_count", "update_connector_output"),
        differs="Each connector states its own number of reporting ranks, at most all; the output's "
        "expected_finished_count is all.",
        why="Older vLLM classes ignore it; newer ones use one number for all, and fail if two connectors differ.",
        unasked="A report beyond the stated number is one of a transfer that is over, and is left out.",
        test="tests/unit/routing/test_stock_faults.py::test_w11_connectors_may_state_different_counts",
    ),
    Deviation(
        name="block-copies-counted",
        hooks=("set_host_xfer_buffer_ops",),
        differs="Each connector gets its own copy operation, which copies as vLLM's does or calls it.",
        why="Copies are counted by connector.",
        unasked="Every copy is made as asked, and counted for the connector that asked for it.",
        test="tests/transparency/test_declared.py::test_each_connector_has_a_copy_operation_of_its_own",
    ),
    Deviation(
        name="unexpected-reports-left-out",
        hooks=("update_connector_output",),
        differs="A report of an end (by a connector without such an open load or promised save) is removed from it. A "
        "failure that it reports of another connector's load counts, and that connector's receipt is still waited for.",
        why="vLLM's own class takes each for a receipt: the engine ends, or resumes before the load is complete.",
        unasked="An end that it reports of another connector's load is left out; a failure fails that load.",
        test="tests/unit/routing/test_stock_faults.py::test_w1_only_the_owners_report_of_a_load_counts",
    ),
    Deviation(
        name="early-saves-held",
        hooks=("update_connector_output",),
        differs="A save reported before its request ends is kept back until the save is promised.",
        why="vLLM's own class passes the report on, and the engine ends.",
        unasked="A save that is never promised is counted as unexpected at the request's end, and has no other effect.",
        test="tests/unit/routing/test_stock_faults.py::test_w12_a_running_request_survives_an_early_report",
    ),
    Deviation(
        name="partial-tails-counted",
        hooks=("update_connector_output",),
        differs="A connector that accepts a request's partial tail is waited for like one that promises a save.",
        why="vLLM's own class does not count it and frees the blocks at the first report of any connector.",
        unasked="A report by a connector that has not accepted the tail releases nothing.",
        test="tests/unit/routing/test_stock_faults.py::test_w12_an_accepted_partial_tail_is_a_promise",
    ),
    Deviation(
        name="bad-blocks-fail-the-load",
        hooks=("update_connector_output",),
        differs="With several KV cache groups, bad blocks of an asynchronous load are reported as a failed load.",
        why="A block id does not identify its request there, and vLLM's error crashes the engine.",
        unasked="Bad blocks in another connector's load fail that load; blocks of no load reach vLLM, which raises.",
        test="tests/unit/routing/test_stock_faults.py::test_w16_with_several_groups_a_failed_load_is_recomputed",
    ),
    Deviation(
        name="one-completion",
        hooks=("update_connector_output",),
        differs="A request that ends during its asynchronous load, with saves promised, is completed once, after all.",
        why="vLLM's own class completes it twice, and the engine ends.",
        unasked="Reports of other connectors about the request do not complete it.",
        test="tests/unit/routing/test_stock_faults.py::test_w20_an_abort_of_a_load_with_a_save_completes_once",
    ),
    Deviation(
        name="failed-load-not-repeated",
        hooks=("get_num_new_matched_tokens", "update_state_after_alloc"),
        differs="If a connector's asynchronous load of a request failed, its lookups count as 0 tokens until that "
        "request has run.",
        why="Otherwise vLLM would repeat the failing load for as long as the connector offers it.",
        unasked="It may write into blocks that vLLM computes: bad blocks that it reports are passed on.",
        test="tests/transparency/test_declared.py::test_a_failed_load_is_not_repeated",
    ),
    Deviation(
        name="all-are-reset",
        hooks=("reset_cache",),
        differs="A reset reaches every connector even if one raises; the first error is raised afterwards.",
        why="vLLM's own class skips the connectors after it.",
        unasked="Nothing: a reset is asked of every connector.",
        test="tests/transparency/test_declared.py::test_a_reset_reaches_every_connector_after_one_raised",
    ),
    Deviation(
        name="open-lookups-polled",
        hooks=("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
        differs="With wait_for or lookup_timeout_ms, a connector whose answer was not waited for is asked in every "
        "step until it answers, then gets the blocks with 0 tokens, and does not see that request as scheduled.",
        why="A connector that gets its blocks before it has answered keeps the locks of its lookup.",
        unasked="It may write into blocks of another load: bad blocks that it reports fail that load.",
        test="tests/unit/routing/test_lookups.py::test_lookup_answered_after_the_load_is_given_the_blocks_then",
    ),
    Deviation(
        name="isolated-connectors-see-less",
        hooks=(
            *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
            *("register_finished_partial_tail", "request_finished", "request_finished_all_groups"),
            *("update_connector_output", "get_transfer_results", "get_finished"),
            *("take_events", "get_kv_connector_stats", "has_pending_block_frees", "has_pending_push_work"),
        ),
        differs="With the option best_effort, a connector in quarantine sees no new requests, and no longer sees the "
        "requests that it knew as scheduled; after a slow call it sees no steps in which it has nothing under way.",
        why="It would end or delay the engine, or save under block tables that a failed call left incomplete.",
        unasked="It may write into blocks of another load: bad blocks that it reports fail that load.",
        test="tests/unit/routing/test_isolation_requests.py::test_known_requests_go_on_being_reported_and_are_not_saved",
    ),
)
