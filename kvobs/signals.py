"""Every metric of kvobs, once, as data: name, help, labels and their closed sets of values.

The recorder counts by slot, the wire ships slots, the API server exposes them: all three read this table, so none
can drift. Labels on all metrics, before those listed: vLLM's own (``model_name``, ``engine``) and ``connector``, the
child's name.
"""

import zlib
from dataclasses import dataclass, field
from itertools import product


@dataclass(frozen=True, slots=True)
class Signal:
    """A counter kept for every child.

    ``labels`` maps a label's name to its closed set of values. ``name`` ends in its unit and ``_total``.
    """

    name: str
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)


LOOKUPS = Signal(
    "kvobs_lookups_total",
    "Lookups as vLLM asked them, repeats included.",
    {"outcome": ("hit", "miss", "pending", "timeout")},
)
OFFERED_TOKENS = Signal(
    "kvobs_offered_tokens_total", "Tokens the connector could have loaded, once per request (tokens)."
)
ADMITTED_TOKENS = Signal("kvobs_admitted_tokens_total", "Tokens vLLM decided to load from the connector (tokens).")
FORGONE_TOKENS = Signal(
    "kvobs_forgone_tokens_total", "Tokens the connector offered beyond what the chosen one did (tokens)."
)
UNCLAIMED_OFFERS = Signal(
    "kvobs_unclaimed_offers_total", "Requests for which the connector offered tokens and was not chosen."
)
LOADS = Signal(
    "kvobs_loads_total",
    "Loads that ended, by mode and outcome.",
    {"mode": ("sync", "async"), "outcome": ("ok", "failed", "aborted")},
)
LOAD_TOKENS = Signal("kvobs_load_tokens_total", "Tokens loaded, failed loads not counted (tokens).")
SAVES = Signal("kvobs_saves_total", "Saves promised at the end of a request and reported.", {"outcome": ("ok",)})
FOREIGN_REPORTS = Signal(
    "kvobs_foreign_reports_total",
    "Reports about a load or save that the connector does not own; they have no effect.",
    {"kind": ("load", "failure", "save")},
)
FAILED_SYNC_LOADS = Signal(
    "kvobs_failed_sync_loads_total", "Synchronous loads that failed in a step whose blocks the siblings may have saved."
)

COUNTERS: tuple[Signal, ...] = (
    LOOKUPS,
    OFFERED_TOKENS,
    ADMITTED_TOKENS,
    FORGONE_TOKENS,
    UNCLAIMED_OFFERS,
    LOADS,
    LOAD_TOKENS,
    SAVES,
    FOREIGN_REPORTS,
    FAILED_SYNC_LOADS,
)

# (signal, label values) of each slot of one child; a child's slots follow those of the child before it.
SLOTS: tuple[tuple[Signal, tuple[str, ...]], ...] = tuple(
    (signal, values) for signal in COUNTERS for values in product(*signal.labels.values())
)
SLOT: dict[tuple[str, ...], int] = {(signal.name, *values): i for i, (signal, values) in enumerate(SLOTS)}

# Two peers with the same digest mean the same thing by a slot.
TABLE_DIGEST: int = zlib.crc32(repr(sorted(SLOT.items())).encode())


def slot(signal: Signal, *values: str) -> int:
    """Return the slot of ``signal`` with these label values; KeyError when the table has no such series."""
    return SLOT[(signal.name, *values)]
