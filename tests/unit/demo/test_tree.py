"""A trace as the demo shows it, character by character."""

from typing import Any

from rich.console import Console

from kvobs.cli.waterfall import BAR
from kvobs.demo.tree import tree
from kvobs.testing.collector import ReceivedSpan

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = 99


def span(name: str, span_id: int, parent: int, start_ms: float, end_ms: float, **more: Any) -> ReceivedSpan:
    """Return a span of one trace; what begins with `kv_` is an attribute `kv_transfer.`, `__` being a dot."""
    attributes = {f"kv_transfer.{key[3:].replace('__', '.')}": more.pop(key) for key in list(more) if key[:3] == "kv_"}
    attributes |= more.pop("attributes", {})
    start_ns, end_ns = (1_000_000_000 + round(ms * 1e6) for ms in (start_ms, end_ms))
    return ReceivedSpan(name, TRACE, f"{span_id:016x}", f"{parent:016x}", start_ns, end_ns, attributes, **more)


REQUEST = {"gen_ai.request.id": "cmpl-1-0"}
LOADED = [  # as they arrive: ends first
    span("kv.lookup", 2, CLIENT, 0.4, 3.1, attributes=REQUEST, kv_sampling__reason="parent",
         kv_offered_tokens__cpu=1864, kv_offered_tokens__disk=0),
    span("kv.load.rank", 6, 3, 4.2, 23.1, kv_connector="cpu", kv_rank=1),
    span("kv.load.rank", 5, 3, 4.1, 11, kv_connector="cpu", kv_rank=0),
    span("kv.call start_load_kv", 7, 6, 4.2, 22.5, kv_connector="cpu", kv_rank=1, kv_hook="start_load_kv",
         kv_sampling__reason="slow"),
    span("kv.load cpu", 3, CLIENT, 3.2, 24, kv_connector="cpu", kv_tokens=1864, kv_bytes=1_769_472, kv_mode="async",
         kv_outcome="ok", kv_slowest_rank=1, kv_rank_skew=0.0121, kv_sampling__reason="parent", attributes=REQUEST),
    span("llm_request", 1, CLIENT, 0, 67, attributes=REQUEST),
]  # fmt: skip


def shown(*spans: ReceivedSpan, width: int = 100, colour: bool = False) -> str:
    """Return a tree as it is printed, without the spaces at the ends of its lines."""
    console = Console(width=width, color_system="standard" if colour else None, force_terminal=colour)
    with console.capture() as capture:
        console.print(tree(spans))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_a_loaded_request_reads_from_cause_to_effect() -> None:
    """In order of start; what a parent shows is not repeated; the sampling reason 'parent' is not shown."""
    assert (
        shown(*LOADED)
        == """\
trace 4bf92f3577b34da6a3ce929d0e0e4736  cmpl-1-0
├── llm_request                    0.00  67.00 ms  ████████████████
├── kv.lookup                      0.40   2.70 ms  █                 offered: cpu 1,864 disk 0
└── kv.load cpu                    3.20  20.80 ms  ██████            1,864 tokens, 1.8 MB, async,
                                                                     ok, rank 1 last by 12.1 ms
    ├── kv.load.rank 0             4.10   6.90 ms  ███
    └── kv.load.rank 1             4.20  18.90 ms   █████
        └── kv.call start_load_kv  4.20  18.30 ms   ████             sampled: slow"""
    )
    assert shown(*reversed(LOADED), *LOADED) == shown(*LOADED), "order of arrival and repeats change nothing"


def test_a_failure_is_red_and_says_why() -> None:
    failed = span("kv.call start_load_kv", 7, CLIENT, 4, 5, kv_connector="disk", kv_rank=0, kv_sampling__reason="error",
                  attributes={"error.type": "TimeoutError"}, error=True)  # fmt: skip
    assert (
        shown(failed)
        == """\
trace 4bf92f3577b34da6a3ce929d0e0e4736
└── kv.call start_load_kv disk rank 0  0.00  1.00 ms  ████████████████  TimeoutError, sampled: error"""
    )
    red = "\x1b[31m"
    for part in ("kv.call start_load_kv disk rank 0", "█" * BAR, "TimeoutError"):
        assert red + part in shown(failed, colour=True)
    assert red not in shown(*LOADED, colour=True)


def test_spans_of_several_services_name_them_and_their_links() -> None:
    """A link within the trace is seen in the tree already."""
    links = (("ab" * 16, "01" * 8), (TRACE, "02" * 8))
    assert shown(
        span("kv.lookup", 1, CLIENT, 0, 1, attributes={"gen_ai.request.id": "a-0"}, resource={"service.name": "P"}),
        span("kv.load nixl", 2, 1, 1, 1040.5, attributes={"gen_ai.request.id": "b-0"}, resource={"service.name": "D"},
             kv_tokens=300, kv_outcome="failed", links=links),
    ) == """\
trace 4bf92f3577b34da6a3ce929d0e0e4736  a-0, b-0
└── kv.lookup         0.00      1.00 ms  █                 P
    └── kv.load nixl  1.00  1,039.50 ms  ████████████████  D, 300 tokens, failed, linked to trace
                                                           abababab"""  # fmt: skip


def test_an_orphan_names_its_connector_and_no_span_has_no_line() -> None:
    orphan = span("kv.load.rank", 5, 3, 4.1, 11, kv_connector="cpu", kv_rank=0)
    assert shown(orphan).splitlines()[1].startswith("└── kv.load.rank 0 cpu  ")
    assert shown() == "trace"


ISOLATED = [
    span("llm_request", 1, CLIENT, 0, 10_120.26, attributes=REQUEST),
    span("kv.load cpu", 3, 1, 7.35, 10_009.11, kv_connector="cpu", kv_tokens=896, kv_bytes=1_769_472, kv_mode="async",
         kv_outcome="failed", attributes=REQUEST, error=True),
    span("kv.call update_state_after_alloc", 4, 3, 10_008, 10_009.25, kv_connector="cpu", kv_rank=1, error=True,
         attributes={"error.type": "TimeoutError"}),
]  # fmt: skip


def test_a_narrow_window_has_no_bars() -> None:
    assert (
        shown(*ISOLATED, width=72)
        == """\
trace 4bf92f3577b34da6a3ce929d0e0e4736  cmpl-1-0
└── llm_request                                         0.00  10.12 s
    └── kv.load cpu                                     7.35  10.00 s
          896 tokens, 1.8 MB, async, failed
        └── kv.call update_state_after_alloc rank 1  10.01 s  1.25 ms
              TimeoutError"""
    )
