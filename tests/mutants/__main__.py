"""Make single faults in kvobs, one at a time in a copy of the tree, and see whether the unit tests find them.

    python -m tests.mutants [--number 200] [--seed 1] [--module ledger ...] [--jobs 2]

Before that, if no module is named: the faults of routing, and whether the comparison with vLLM's own router finds them;
the faults where two parts meet, and whether their tests do. It ends with 1 if it misses one of those, or if fewer than
95 % of the others that a test can find are found.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.mutants.equivalents import EQUIVALENTS, Equivalent
from tests.mutants.faults import draw
from tests.mutants.forked import run_alone, warm
from tests.mutants.hunt import FIRST_S, ROOT, Found, all_modules, all_tests, baseline, copy_tree, hunt

GOAL = 0.95


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``module`` are paths, of all modules if none is named."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=200, help="how many faults (200)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--module", nargs="+", default=[], metavar="NAME", help="in these modules only, such as ledger")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time (one a core)")
    options = parser.parse_args(arguments)
    modules = all_modules(ROOT)
    if unknown := set(options.module) - {Path(path).stem for path in modules}:
        parser.error(f"unknown modules {', '.join(sorted(unknown))}")
    options.is_part = bool(options.module)
    options.module = [path for path in modules if Path(path).stem in options.module or not options.is_part]
    return options


def main(arguments: Sequence[str]) -> int:
    """Draw the faults, run the tests against each, and print what came of them."""
    options = parsed(arguments)
    missed = not options.is_part and _misses_planted_faults()
    faults = draw(ROOT, options.module, options.number, options.seed)
    with tempfile.TemporaryDirectory(prefix="kvobs-mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(max(1, options.jobs))]
        for tree in trees:
            copy_tree(tree)
        _say("Importing what the tests import")
        warm(run_alone(trees[0], ["--collect-only", *all_tests(ROOT)], FIRST_S).modules)
        _say("Running the tests without a fault")
        covered = baseline(trees[0], options.module)
        _say(f"{len(covered.tests)} tests have passed. Now with {len(faults)} faults, one at a time")
        done: list[Found] = []

        def note(found: Found) -> None:
            done.append(found)
            fault = found.fault
            _say(f"{len(done):>4} {found.how:<9}{found.seconds:6.1f} s  {fault.module}:{fault.line}  {found.by}")

        text, share = report(hunt(trees, faults, covered, note), EQUIVALENTS)
    print(f"\nSeed {options.seed}\n{text}")
    return 1 if missed or share < GOAL else 0


def report(results: Sequence[Found], equivalents: Collection[Equivalent]) -> tuple[str, float]:
    """Return a table of the modules and each fault that was not found, and the share of those that a test can find."""
    reasons = {entry.key: entry.reason for entry in equivalents}
    became: dict[str, list[Found]] = {"killed": [], "equivalent": [], "survived": []}
    for found in results:
        how = "equivalent" if found.fault.key in reasons else "survived"
        became[how if found.how == "survived" else "killed"].append(found)
    lines = [f"{'module':<42}{'faults':>8}{'killed':>8}{'equivalent':>12}{'survived':>10}"]
    for name in [*sorted({found.fault.module for found in results}), "all"]:
        every, dead, same, left = (
            sum(name in ("all", found.fault.module) for found in part) for part in (results, *became.values())
        )
        lines.append(f"{name:<42}{every:>8}{dead:>8}{same:>12}{left:>10}")
    for how in ("equivalent", "survived"):
        for fault in (found.fault for found in became[how]):
            lines += ["", f"{how}: {fault.module}:{fault.line} {fault.function}", f"  - {fault.before}"]
            lines += [f"  + {fault.after}", *(f"  {reasons[key]}" for key in [fault.key] if key in reasons)]
    killed = len(became["killed"])
    share = killed / max(1, len(results) - len(became["equivalent"])) if results else 1.0
    lines += ["", f"killed: {share:.1%} of those that a test can find, {killed / max(1, len(results)):.1%} of all"]
    return "\n".join(lines), share


def _misses_planted_faults() -> bool:
    """Make the faults that are written by hand, in other processes: the forks here must not know kvobs yet."""
    routing, joints = ([sys.executable, "-m", f"tests.mutants.{name}_faults"] for name in ("routing", "joint"))
    of_routing = subprocess.run(routing, cwd=ROOT, stderr=subprocess.DEVNULL, check=False)  # vLLM writes to it
    of_joints = subprocess.run(joints, cwd=ROOT, check=False)
    return bool(of_routing.returncode or of_joints.returncode)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
