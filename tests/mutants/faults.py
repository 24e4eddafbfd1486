"""Make single faults in a module's source with mutmut's operators, and draw some of them with a seed.

mutmut's own run leaves decorated functions and classes out, because it calls the mutated copies of a function through a
generated one; here that would be every property, contained function and dataclass. So only its operators are used.

What no test should repeat is left as it is: annotations and names of types, docstrings, texts with a space, log lines,
messages of errors, names of threads, `strict` of `zip`, which asserts, what is in a tuple of which only the length
counts, and False that becomes None, which conditions treat alike and mypy does not.
"""

import difflib
import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_LOGS = ("once", "log")
_AS_IT_IS = ("__all__", "__slots__")
_NO_MATTER = re.compile(r"(, )?(strict=\w+|name=(\"(XX)?kvobs-[a-z-]+\"|None))|, (?=\))", re.IGNORECASE)
"""An assertion that arguments of `zip` are equally long; a thread's name; the comma that is left of them."""
_NO = re.compile(r"\b(False|None)\b")
_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


@dataclass(frozen=True)
class Fault:
    """One change of one module."""

    module: str  # its path, from the root
    function: str  # with its classes; empty outside of functions
    line: int
    lines: tuple[int, int]  # the first and the last one of the statement
    before: str  # the lines that differ
    after: str
    source: str = field(repr=False)  # the whole module, with the fault

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return what stays the same when other lines of the module change."""
        return self.module, self.function, self.before, self.after


@dataclass(frozen=True)
class _Change:
    node: cst.CSTNode
    changed: cst.CSTNode
    function: str
    lines: tuple[int, int]

    @property
    def on(self) -> range:
        return range(self.lines[0], self.lines[1] + 1)


class _Changes(cst.CSTVisitor):
    """Collects all changes that the operators make to a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Change] = []
        self._inside: list[str] = []
        self._statements: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            self._inside.append(node.name.value)
        if isinstance(node, _STATEMENTS):
            self._statements.append(node)
        if _is_left(node) or (not self._inside and _is_type(node)):
            return False
        if not _is_never_right(node):
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    self.found += [
                        _Change(node, changed, ".".join(self._inside), self._lines(node)) for changed in operator(node)
                    ]
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.ClassDef | cst.FunctionDef):
            self._inside.pop()
        if isinstance(original_node, _STATEMENTS):
            self._statements.pop()

    def _lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the lines of a node's statement; of one with a body those of its head, as far as the node."""
        statement = self._statements[-1]
        last = node if isinstance(statement, cst.BaseCompoundStatement) else statement
        first = self.get_metadata(PositionProvider, statement).start.line
        place = self.get_metadata(PositionProvider, last, None)
        return first, max(first, place.end.line) if isinstance(place, CodeRange) else first


def _is_left(node: cst.CSTNode) -> bool:
    """Return whether nothing is changed in a node."""
    match node:
        case (
            cst.Annotation()
            | cst.Import()
            | cst.ImportFrom()
            | cst.Raise()
            | cst.If(test=cst.Name("TYPE_CHECKING"))
            | cst.Decorator(decorator=cst.Call(func=cst.Name("dataclass")))
        ):
            return True
        case cst.SimpleString() | cst.ConcatenatedString():
            return " " in str(node.evaluated_value)
        case cst.Call(func=cst.Name("len"), args=[cst.Arg(value=cst.Tuple())]):
            return True
        case cst.Call(func=cst.Name(name) | cst.Attribute(value=cst.Name(name))):
            return name in _LOGS
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(name))]):
            return name in _AS_IT_IS
    return False


def _is_type(node: cst.CSTNode) -> bool:
    """Return whether a node of a module gives a name to a type: annotations use it, which nobody evaluates."""
    match node:
        case cst.Assign(value=cst.Subscript(value=cst.Name("Annotated"))):
            return False  # pydantic reads it
        case cst.Assign(value=cst.Subscript()) | cst.AnnAssign(annotation=cst.Annotation(cst.Name("TypeAlias"))):
            return True
        case cst.Assign(value=cst.Call(func=cst.Name(name))):
            return name in ("TypeVar", "ParamSpec")
    return False


def _is_never_right(node: cst.CSTNode) -> bool:
    """Return whether every change of a node, apart from those within, is an error at each call."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in ("len", "isinstance")


def faults_of(root: Path, module: str, seed: object, only: Collection[int] | None = None) -> Iterator[Fault]:
    """Yield each possible fault of a module, or of the statements on some lines, once, in the order of the seed."""
    source = (root / module).read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    changes = _Changes()
    wrapper.visit(changes)
    found = [change for change in changes.found if only is None or any(line in only for line in change.on)]
    random.Random(f"{seed}:{module}").shuffle(found)
    seen = {source}
    for change in found:
        changed = wrapper.module.deep_replace(change.node, change.changed)
        assert isinstance(changed, cst.Module)
        if changed.code not in seen and _compiles(changed.code, module):
            seen.add(changed.code)
            line, before, after = _difference(source, changed.code)
            if len({_NO.sub("no", _NO_MATTER.sub("", text)) for text in (before, after)}) == 1:
                continue
            yield Fault(module, change.function, line, change.lines, before, after, changed.code)


def draw(root: Path, modules: Sequence[str], number: int, seed: int) -> list[Fault]:
    """Return so many faults, equally many of each module as far as it has them, one more of some by the seed.

    The first faults of a module are the same, whatever the other modules and the number are.
    """
    shuffled = random.Random(seed).sample(modules, len(modules))
    turns = itertools.zip_longest(*(faults_of(root, module, seed) for module in shuffled))
    drawn = itertools.islice((fault for turn in turns for fault in turn if fault is not None), number)
    return sorted(drawn, key=lambda fault: modules.index(fault.module))


def _compiles(source: str, name: str) -> bool:
    try:
        compile(source, name, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _difference(before: str, after: str) -> tuple[int, str, str]:
    """Return the number of the first line that differs, and those lines in both."""
    old, new = before.splitlines(), after.splitlines()
    spans = [op for op in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if op[0] != "equal"]
    first, last = spans[0], spans[-1]
    return first[1] + 1, _joined(old[first[1] : last[2]]), _joined(new[first[3] : last[4]])


def _joined(lines: Sequence[str]) -> str:
    return " ".join(line.strip() for line in lines)
