"""Read from vLLM's source which options a connector, or a tier, has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from kvobs.cli.check.vllm_source import registered, sources, stub, tree

_MAKES_IT = re.compile(r"^\s*from (?!vllm)[\w.]+\.vllm", re.MULTILINE)


class Options(NamedTuple):
    """The options in ``kv_connector_extra_config`` that a connector reads, by its source."""

    known: set[str]
    needed: set[str]  # where a connector reads what must be there
    allowed: dict[str, list[str]]  # the values of some
    ignored: dict[str, str]  # variables that it reads no more, and the option instead

    @property
    def required(self) -> set[str]:
        """Those that must be there: no code looks whether they are."""
        return self.needed - self.known


@cache
def options_of(name: str) -> Options | None:
    """Return the options that one of vLLM's connectors reads; None if its source does not show it."""
    module, cls = registered().get(name, ("", ""))
    found = Options(set(), set(), {}, {})
    files = sources(module) if module and stub(module, cls) else {}
    nodes = ((node, each) for each, text in files.items() if "extra_config" in text for node in ast.walk(tree(each)))
    if any(map(_MAKES_IT.search, files.values())) or any(_note(found, node, each) for node, each in nodes):
        return None  # another package makes the connector, or all options go somewhere
    return found if found.known | found.needed else None


def _note(found: Options, node: ast.AST, module: str) -> bool:
    """Note the options that a node reads; return whether it reads all there are."""
    match node:
        case ast.Call(func=ast.Attribute(attr="items" | "keys" | "copy", value=of)) if _is_extra(of):
            return True
        case ast.Subscript(value=of, slice=ast.Constant(value=str(key)), ctx=context) if _is_extra(of):
            (found.needed if isinstance(context, ast.Load) else found.known).add(key)
        case ast.Compare(left=ast.Constant(value=str(key)), comparators=[of]) if _is_extra(of):
            found.known.add(key)
        case ast.AnnAssign(target=ast.Name(id=variable), value=ast.Dict() as values) if "DEPRECATED_ENV" in variable:
            found.ignored.update(ast.literal_eval(values))
        case ast.Call():
            found.known.update(_read_by(node))
        case ast.FunctionDef():
            found.allowed.update(_values_allowed(node, module))
    return False


def _read_by(node: ast.AST) -> list[str]:
    """Return the option that a call reads, if it reads one."""
    match node:
        case ast.Call(func=ast.Attribute(attr=attr, value=of), args=[ast.Constant(value=str(key)), *_]):
            return [key] if attr == "get_from_extra_config" or (attr in ("get", "pop") and _is_extra(of)) else []
    return []


def _is_extra(node: ast.AST) -> bool:
    of = node.values[0] if isinstance(node, ast.BoolOp) else node
    return str(getattr(of, "attr", getattr(of, "id", ""))).endswith("extra_config")


def _values_allowed(function: ast.FunctionDef, module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each option, with its values, that a function compares with these, and raises if it has another one."""
    read = dict[str, str]()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                for key in (key for inner in ast.walk(value) for key in _read_by(inner)):
                    read[name] = key
            case ast.If(test=ast.Compare(left=ast.Name(id=name), ops=[ast.NotIn()], comparators=[of]), body=body):
                if name in read and isinstance(body[-1], ast.Raise):
                    values = of if not isinstance(of, ast.Name) else _constant(module, of.id)
                    if isinstance(values, ast.Tuple | ast.List | ast.Set):
                        yield read[name], [str(each.value) for each in values.elts if isinstance(each, ast.Constant)]


def _constant(module: str, name: str) -> Any:
    for node in tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) if assigned == name:
                return value
    return None


def parameters_of(module: str, name: str) -> tuple[set[str], set[str], bool] | None:
    """Return the parameters of a class, those without a default, and whether it takes others; None if not known."""
    init = vars(stub(module, name) or object).get("__init__")
    if not isinstance(init, ast.FunctionDef):
        return None
    names = [each.arg for each in init.args.args]
    return set(names), set(names[: len(names) - len(init.args.defaults)]), init.args.kwarg is not None
