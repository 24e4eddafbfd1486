"""Every place of kvobs whose faults are contained, found in its syntax trees, and made to break from inside.

A seam is a block whose exceptions ``kvobs.faults`` takes: the body of a function under ``@contained``, or of a ``try``
with a handler that calls ``faults.contain``; or an observer's method for an event of the router, which the composed
observer contains. None is listed by hand, so none can be forgotten.
"""

import ast
import importlib
import inspect
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import count, cycle
from pathlib import Path
from time import perf_counter_ns
from types import CodeType, FrameType, FunctionType
from typing import Any

import kvobs
from kvobs.probe import native
from kvobs.telemetry.events import EVENTS

PACKAGE = Path(kvobs.__file__).parent
_POINT = "_point_of_tests"
OBSERVERS, PASSING_ON = ("Observer", "TelemetryObserver"), ("Composed", "TelemetryObserver")
HOUR_NS = 3600 * 10**9
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

Point = Callable[[str, int], None]
"""Called with a seam and a number: that of each statement before it, and LEFT when the block is left."""

LEFT = -1

Undo = Callable[[], None]


def find() -> dict[str, str]:
    """Return seam -> the place that its faults are counted by; a seam is called "package.module:function"."""
    found: dict[str, str] = {}
    for finder, _ in FINDERS:
        assert not found.keys() & finder.seams.keys(), "two seams of one name"
        found |= finder.seams
    return found


def instrument(point: Point) -> Undo:
    """Have every seam of this process call ``point`` all along its block; return what undoes it."""
    changed: list[tuple[FunctionType, CodeType]] = []
    for finder, tree in FINDERS:
        module = importlib.import_module(f"kvobs.{finder.module}")
        compiled = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
        codes = {code.co_qualname: code for code in _codes(compiled)}
        setattr(module, _POINT, point)
        for name in {seam.partition(":")[2].partition(".<locals>")[0] for seam in finder.seams}:
            function = _function(module, name)
            changed.append((function, function.__code__))
            function.__code__ = codes[name]

    def undo() -> None:
        for finder, _ in FINDERS:  # a thread may still be in a block
            setattr(sys.modules[f"kvobs.{finder.module}"], _POINT, lambda _seam, _number: None)
        for function, code in changed:
            function.__code__ = code

    return undo


class _Finder(ast.NodeTransformer):
    """Finds the seams of one module, and puts the calls of ``point`` in."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.seams: dict[str, str] = {}
        self._path: list[str] = []
        self._observer: str = ""  # the class that is visited, if it is one

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        is_observer = any(ast.unparse(base) in OBSERVERS for base in node.bases) and node.name not in PASSING_ON
        self._observer = node.name if is_observer else ""
        node = self._within(node, node.name)
        self._observer = ""
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self._within(node, node.name, "<locals>")
        where = next((w for decorator in node.decorator_list if (w := _where(decorator, "contained"))), None)
        if where is None and self._observer and node.name in EVENTS:
            where = "trace" if self._observer in ("Traces", "UrgentLoads") else "record"
        if where is not None:
            docstring = node.body[: ast.get_docstring(node) is not None]
            node.body = docstring + self._broken(node.body[len(docstring) :], where, [*self._path, node.name])
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        self.generic_visit(node)
        calls = [c for handler in node.handlers for statement in handler.body for c in ast.walk(statement)]
        where = next((w for call in calls if (w := _where(call, "contain"))), None)
        if where is not None:
            node.body = self._broken(node.body, where, self._path[:-1])
        return node

    def _within(self, node: ast.AST, *names: str) -> Any:
        self._path += names
        self.generic_visit(node)
        del self._path[-len(names) :]
        return node

    def _broken(self, body: list[ast.stmt], where: str, path: list[str]) -> list[ast.stmt]:
        seam = f"{self.module}:{'.'.join(path)}"
        assert seam not in self.seams, f"two seams in {seam}: give one of them a function of its own"
        self.seams[seam] = where
        steps = [step for i, statement in enumerate(body) for step in (_call(seam, i, statement), statement)]
        return [ast.Try(body=steps, handlers=[], orelse=[], finalbody=[_call(seam, LEFT, body[-1])])]


def _finders() -> Iterator[tuple[_Finder, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        finder, tree = _Finder(module), ast.parse(path.read_text(encoding="utf-8"))
        finder.visit(tree)
        if finder.seams and module != "faults":
            yield finder, tree


def _where(node: ast.AST, function: str) -> str | None:
    """Return the argument of ``function("...")`` or ``faults.function("...")``, if this is one."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    name = ast.unparse(node.func)
    return str(node.args[0].value) if name in (function, f"faults.{function}") else None


def _call(seam: str, number: int, at: ast.stmt) -> ast.stmt:
    call = ast.parse(f"{_POINT}({seam!r}, {number})").body[0]
    for node in ast.walk(call):
        ast.copy_location(node, at)
    return call


FINDERS = tuple(_finders())
"""Made while no thread of an engine logs a traceback: CPython 3.11 can not parse in two threads at a time."""


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _function(module: Any, name: str) -> FunctionType:
    found: Any = reduce(inspect.getattr_static, name.split("."), module)
    found = found.fget if isinstance(found, property) else inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), name
    return found


class SabotageError(Exception):
    """What kvobs must contain."""


class Breaker:
    """Raises at those points of kvobs's seams that ``is_on`` says, and notes in which; at every so manieth passage.

    Not in a thread that ran before: an earlier test has left it, and does not contain what it raises.
    """

    def __init__(self, is_on: Callable[[str, int], bool], every: int) -> None:
        self.hit: set[str] = set()
        self._others = set(threading.enumerate()) - {threading.current_thread()}
        self._is_on = is_on
        self._every = every
        self._passages: dict[tuple[str, int], Iterator[int]] = defaultdict(count)

    def __call__(self, seam: str, number: int) -> None:
        if seam.endswith(":Pauses.watch") or (seam.endswith(":reported") and number != LEFT):
            return  # in a thread that outlives the test, and before the block that it is around
        if threading.current_thread() in self._others:
            return
        if self._is_on(seam, number) and next(self._passages[seam, number]) % self._every == 0:
            self.hit.add(seam)
            raise SabotageError(f"{seam}, at {number}")


def jumping(is_on: Callable[[], bool]) -> Callable[[], int]:
    """Return a clock that is an hour ahead at one reading and an hour behind at the next."""
    jumps = cycle((HOUR_NS, -HOUR_NS, 0))
    return lambda: perf_counter_ns() + (next(jumps) if is_on() else 0)


def replace_clock(clock: Callable[[], int], replace: Callable[[object, str, Any], None] = setattr) -> None:
    """Have all of kvobs that is imported read this clock."""
    readings = {"perf_counter_ns": clock, "perf_counter": lambda: clock() / 1e9}
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("kvobs.") and not name.endswith(".pauses")  # whose threads outlive the test
        for kind in readings.keys() & vars(module).keys() if is_ours else ():
            replace(module, kind, readings[kind])
    probe = native.probe
    replace(native, "probe", lambda *page: probe(*page, clock))


class Writes:
    """An audit hook that notes which files kvobs opens for writing; what its connectors write is theirs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & _WRITING:
            opener = self._opener(sys._getframe(1))
            if opener.startswith("kvobs."):
                self._note(f"{opener} {arguments[0]}")

    @staticmethod
    def _opener(frame: FrameType | None) -> str:
        """Return the module that is behind it: the nearest of kvobs, of vLLM or of a test."""
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith(("kvobs.", "vllm.", "tests.")):
                return name
            frame = frame.f_back
        return ""
