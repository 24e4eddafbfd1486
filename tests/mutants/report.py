"""What came of the faults, as text: a table of the modules, and each fault that was not found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.mutants.equivalents import Equivalent
from tests.mutants.hunt import Found

GOAL = 0.95


@dataclass(frozen=True)
class Verdicts:
    """The faults by what came of them."""

    killed: list[Found]
    survivors: list[Found]
    equivalent: list[tuple[Found, str]]  # with the reason

    @classmethod
    def of(cls, found: Sequence[Found], equivalents: Collection[Equivalent]) -> Verdicts:
        """Sort the faults; a killed one is killed, whatever the table of equivalents says."""
        reasons = {entry.key: entry.reason for entry in equivalents}
        lived = [one for one in found if one.how == "survived"]
        return cls(
            [one for one in found if one.how != "survived"],
            [one for one in lived if one.fault.key not in reasons],
            [(one, reasons[one.fault.key]) for one in lived if one.fault.key in reasons],
        )

    @property
    def share(self) -> float:
        """Return the share of killed faults among those that a test can find."""
        possible = len(self.killed) + len(self.survivors)
        return len(self.killed) / possible if possible else 1.0

    @property
    def modules(self) -> list[str]:
        """Return the modules with faults."""
        every = [*self.killed, *self.survivors, *(one for one, _ in self.equivalent)]
        return sorted({one.fault.module for one in every})


def text(verdicts: Verdicts) -> str:
    """Return the whole report."""
    lines = [f"{'module':<42}{'faults':>8}{'killed':>8}{'equivalent':>12}{'survived':>10}"]
    killed, equivalent, survived = 0, 0, 0
    for module in verdicts.modules:
        dead = _in(verdicts.killed, module)
        same = _in([one for one, _ in verdicts.equivalent], module)
        lived = _in(verdicts.survivors, module)
        killed, equivalent, survived = killed + dead, equivalent + same, survived + lived
        lines.append(_row(module, dead, same, lived))
    lines.append(_row("all", killed, equivalent, survived))
    for one, reason in verdicts.equivalent:
        lines += ["", f"equivalent: {described(one)}", f"  {reason}"]
    for one in verdicts.survivors:
        lines += ["", f"survived: {described(one)}"]
    every = killed + equivalent + survived
    lines += ["", f"killed: {verdicts.share:.1%} of those that a test can find, {killed / max(1, every):.1%} of all"]
    return "\n".join(lines)


def described(found: Found) -> str:
    """Return a fault's place and its change."""
    fault = found.fault
    return f"{fault.module}:{fault.line} {fault.function}\n  - {fault.before}\n  + {fault.after}"


def _row(name: str, killed: int, equivalent: int, survived: int) -> str:
    return f"{name:<42}{killed + equivalent + survived:>8}{killed:>8}{equivalent:>12}{survived:>10}"


def _in(found: Sequence[Found], module: str) -> int:
    return sum(one.fault.module == module for one in found)
