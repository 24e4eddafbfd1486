"""The table of the demo's faults: effect, setup, and the metrics that show each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.samples import Sample

from kvobs.schema import signals


@dataclass(frozen=True)
class Fault:
    """A fault of the connector ``cpu``: the tensor parallel size that it needs, and the metrics that show it."""

    name: str
    says: str
    ranks: int
    is_isolated: bool
    shown_by: tuple[signals.Signal, ...]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("slow-connector", "cpu reports each load 1.2 s late", 1, False, (signals.LOAD_DURATION, signals.LOADS)),
        Fault("failing-connector", "cpu raises on each load, and is isolated", 1, True,
              (signals.CALL_ERRORS, signals.QUARANTINES, signals.LOADS, signals.RECOMPUTED_TOKENS)),
        Fault("slow-rank", "cpu's loads end 1.2 s later on rank 1 of two", 2, False,
              (signals.SLOWEST_RANK, signals.RANK_SKEW, signals.LOAD_DURATION)),
    )
}  # fmt: skip


def evidence(fault: Fault, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of /metrics that show a fault, with connector and own labels; a histogram as its mean."""
    sums: dict[tuple[str, str], float] = {}
    for sample in samples:
        for signal in fault.shown_by:
            labels = ", ".join(f'{name}="{sample.labels[name]}"' for name in ("connector", *signal.labels)
                               if name in sample.labels)  # fmt: skip
            if signal.kind is not signals.Kind.HISTOGRAM and sample.name == signal.name and sample.value:
                yield f"{signal.name}{{{labels}}} {sample.value:g}"
            elif sample.name in (f"{signal.name}_sum", f"{signal.name}_count"):
                sums[sample.name, labels] = sums.get((sample.name, labels), 0) + sample.value
    for (name, labels), count in sums.items():
        if name.endswith("_count") and count:
            total = sums[f"{name.removesuffix('_count')}_sum", labels]
            yield f"{name.removesuffix('_count')}{{{labels}}} {total / count:.3g} s on average, {count:g} times"
