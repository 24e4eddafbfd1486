"""Show the lines of /metrics that have a fault."""

from collections.abc import Iterable, Iterator

from kvobs.export.numbers import Values
from kvobs.schema import signals


def evidence(shown_by: Iterable[signals.Signal], values: Values) -> Iterator[str]:
    """Yield the lines of /metrics that these have, with connector and own labels; a histogram as its mean."""
    sums: dict[tuple[str, str], float] = {}
    for (name, named), value in values.items():
        has = dict(named)
        for signal in shown_by:
            labels = ", ".join(f'{label}="{has[label]}"' for label in ("connector", *signal.labels) if label in has)
            if signal.kind is not signals.Kind.HISTOGRAM and name == signal.name and value:
                yield f"{signal.name}{{{labels}}} {value:g}"
            elif name in (f"{signal.name}_sum", f"{signal.name}_count"):
                sums[name, labels] = sums.get((name, labels), 0) + value
    for (name, labels), count in sums.items():
        if name.endswith("_count") and count:
            total = sums[f"{name.removesuffix('_count')}_sum", labels]
            yield f"{name.removesuffix('_count')}{{{labels}}} {total / count:.3g} s on average, {count:g} times"
