"""Compare what a life was with vLLM's MultiConnector and with kvobs's, call by call.

Up to the first mark both must be the same, but for what ``docs.deviations`` declares. A mark stands where a
connector does something that vLLM's own class cannot handle: from there on only kvobs is looked at, which must end
well.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

from tests.transparency.engine import live
from tests.transparency.life import STOCK_ASKS, Life
from tests.transparency.messages import COUNTED
from tests.transparency.record import MARK, Cause, Entry, Run

BEFORE = 6
"""How many common entries a difference is shown with."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison of one life says; ``fault`` is None where all is as declared."""

    life: Life
    stock: Run
    kvobs: Run
    compared: int
    fault: str | None

    @property
    def cause(self) -> Cause | None:
        """Return why the life was compared up to some point only."""
        return next(iter(self.kvobs.causes), None)

    @property
    def stock_end(self) -> str:
        """Return how the life ended with vLLM's own class."""
        if self.stock.raised:
            return "ended by a connector"
        return "died" if self.stock.error else "left something" if self.stock.left else "lived"


def _stats(entry: Entry, life: Life) -> Entry:
    """Leave out the stats in the output that are not the connector's own."""
    if entry.hook != "update_connector_output":
        return entry
    own = COUNTED + entry.who.removesuffix(" scheduler")
    (output,) = entry.arguments
    shown = [
        (name, tuple(each for each in value or () if each[0] == own)) if name == "kv_connector_stats" else (name, value)
        for name, value in output[1:]
    ]
    return entry._replace(arguments=((output[0], *shown),))


def _without_field(entry: Entry, field: str) -> Entry:
    """Leave out a field of the workers' output."""
    if entry.hook != "update_connector_output":
        return entry
    (output,) = entry.arguments
    return entry._replace(arguments=(tuple(each for each in output if each[0] != field),))


def _empty_outputs(entry: Entry, life: Life) -> Entry | None:
    """Leave out that a connector was shown an output in which nothing is."""
    if entry.hook != "update_connector_output" or not life.running.is_uni:
        return entry
    _, *fields = entry.arguments[0]
    return entry if any(value not in EMPTY for _, value in fields) else None


EMPTY = (None, 0, (), ("set",))


def _counts(entry: Entry, life: Life) -> Entry | None:
    """Leave out that connectors are asked how many ranks report, where vLLM's own class does not ask them."""
    if entry.hook == "get_finished_count" and not STOCK_ASKS:
        return None
    return _without_field(entry, "expected_finished_count") if life.one_reports else entry


ALLOWED: dict[str, Callable[[Entry, Life], Entry | None]] = {
    "handshakes-go-home": lambda entry, _: None if "handshake" in entry.hook else entry,
    "worker-events-collected": lambda entry, _: (
        None if entry.hook == "get_kv_connector_kv_cache_events" else _without_field(entry, "kv_cache_events")
    ),
    "own-stats-shown": _stats,
    "finished-counts-by-connector": _counts,
    "empty-outputs-shown": _empty_outputs,  # once the fields above are out
}
"""By the name of a declared deviation, what is left out of both runs for it."""

FROM_HERE: dict[Cause, str] = {
    Cause.STRAY_RECEIPT: "unexpected-reports-left-out",
    Cause.STRAY_FAILURE: "unexpected-reports-left-out",
    Cause.STRAY_SAVE: "unexpected-reports-left-out",
    Cause.EARLY_SAVE: "early-saves-held",
    Cause.TAILS: "partial-tails-counted",
    Cause.TWO_COMPLETIONS: "one-completion",
    Cause.COUNTED_FAILURE: "finished-counts-by-connector",
    Cause.OFFERED_AGAIN: "failed-load-not-repeated",
}
"""By the cause of a mark, the declared deviation that takes effect there."""


def judge(life: Life) -> Verdict:
    """Live a life twice, and compare."""
    return compare(life, live(life, "stock"), live(life, "kvobs"))


def compare(life: Life, stock: Run, kvobs: Run) -> Verdict:
    theirs, ours = list(_comparable(stock.entries, life)), list(_comparable(kvobs.entries, life))
    common, fault = 0, None
    for common, (expected, found) in enumerate(zip_longest(theirs, ours)):
        if expected != found:
            fault = _tell(theirs, common, expected, found)
            break
    if fault is None:
        fault = _judge_ends(life, stock, kvobs)
    elif kvobs.error:
        fault += f"\nkvobs ended with:\n{kvobs.error}"
    return Verdict(life, stock, kvobs, common, fault)


def _comparable(entries: Iterable[Entry], life: Life) -> Iterable[Entry]:
    """Return what must be the same: all up to the first mark, which is the last."""
    numbers: dict[int, int] = {0: 0}  # of the objects, by their first appearance in what is compared
    for entry in entries:
        kept: Entry | None = entry
        for leave_out in ALLOWED.values():
            kept = leave_out(kept, life) if kept is not None else None
        if kept is not None:
            objects = [numbers.setdefault(each, len(numbers)) for each in kept.objects]
            yield kept._replace(objects=tuple(objects))
        if entry.who == MARK:
            return


def _judge_ends(life: Life, stock: Run, kvobs: Run) -> str | None:
    """Look at how the lives ended: kvobs must come through all of them, and what ends stock must have a name."""
    if stock.raised != kvobs.raised and not stock.causes:
        return f"a connector's exception reaches vLLM with one router: {stock.raised} - {kvobs.raised}"
    is_vllms_own = hangs_in_vllm(life, stock) and (stock.left, stock.error) == (kvobs.left, kvobs.error)
    if kvobs.raised or is_vllms_own:
        return None
    if kvobs.error:
        return f"kvobs ended with:\n{kvobs.error}\nand vLLM's own class: {stock.error or 'lived'}"
    if kvobs.left:
        return f"with kvobs there was left, when nothing more happened: {kvobs.left}; with vLLM's: {stock.left}"
    if not stock.causes and (stock.error or stock.left):
        return f"vLLM's own class failed for no known cause: {stock.error or stock.left}"
    return None


def hangs_in_vllm(life: Life, stock: Run) -> bool:
    """Return whether a life ends badly whatever the router: it was the same to its end, and vLLM's scheduler hangs.

    One step ahead, it forgets the token that is under way for a request whose synchronous load turns out bad.
    """
    return life.running.is_async and stock.seen["bad blocks of a sync load"] > 0 and not stock.causes


def _tell(entries: list[Entry], at: int, expected: Entry | None, found: Entry | None) -> str:
    step = (expected or found or entries[-1]).step
    before = "\n".join(f"  {entry}" for entry in entries[max(0, at - BEFORE) : at])
    return (
        f"step {step}, {(expected or found or entries[-1]).who}: the calls differ\n"
        f"  vLLM's: {expected}\n  kvobs's: {found}\n{_pointer(expected, found)}before that, with both:\n{before}"
    )


def _pointer(expected: Entry | None, found: Entry | None) -> str:
    """Return the parts of two calls of one hook that differ."""
    if expected is None or found is None or expected[:3] != found[:3]:
        return ""
    parts = (part for pair in zip_longest(expected.arguments, found.arguments) for part in _differing(*pair))
    told = "".join(f"  differs: {theirs} - {ours}\n" for theirs, ours in parts)
    return told or "  differs: by an object that is the same one before in one of them, and another in the other\n"


def _differing(theirs: object, ours: object) -> Iterable[tuple[object, object]]:
    if theirs == ours:
        return
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and len(theirs) == len(ours):
        for pair in zip(theirs, ours, strict=True):
            yield from _differing(*pair)
    else:
        yield theirs, ours
