"""``make bench``: what kvobs costs, against budgets; exit status 1 when one is missed by more than the noise."""

import logging
import sys

from rich.console import Console
from rich.table import Table

from tests.bench.calls import CHILDREN, measure

# Routing alone; recording comes on top of it and has the rest of the 2.5 that a recorded fan-out may cost.
BUDGET = {
    "wait_for_layer_load": 1.5,
    "save_kv_layer": 1.5,
    "a worker's step": 2.5,
    "wait_for_layer_load, empty in all": 0.25,
    "save_kv_layer, empty in all": 0.25,
    "a worker's step, empty in all": 2.5,
}


def main() -> int:
    logging.disable(logging.WARNING)
    table = Table(title=f"A fan-out over {CHILDREN} children, CPU time", title_justify="left")
    for heading in ("", "stock", "kvobs", "ratio", "quartiles", "budget"):
        table.add_column(heading, justify="right" if heading else "left")
    missed = False
    for cost in measure():
        budget = BUDGET[cost.hook]
        is_missed = cost.low > budget
        missed |= is_missed
        table.add_row(
            cost.hook,
            f"{cost.stock_ns:.0f} ns",
            f"{cost.kvobs_ns:.0f} ns",
            f"{cost.ratio:.2f}",
            f"{cost.low:.2f} to {cost.high:.2f}",
            f"{budget:.2f}{' MISSED' if is_missed else ''}",
        )
    Console(width=100).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
