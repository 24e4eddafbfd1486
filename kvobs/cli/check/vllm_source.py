"""Read the installed vLLM's version, and the names, classes and options in its source, because importing it is slow."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvobs.connectors.known import OURS, spec_of
from kvobs.connectors.specs import WORDS
from kvobs.connectors.validation import NotUsableError, not_registered
from kvobs.schema import kinds
from kvobs.schema.findings import show

CONNECTORS = "distributed/kv_transfer/kv_connector/factory.py"
_REGISTERED = re.compile(r"""\bregister_\w+\(\s*["'](\w+)["'](?:,\s*["']([\w.]+)["'],\s*["'](\w+)["'])?""")
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=.*?[\"']([^\"']+)[\"']", re.MULTILINE)
_IMPORT = re.compile(r"^\s*from\s+(\.*)([\w.]*)\s+import\s+(\([^)]*\)|.+)$", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:\s+as\s+(\w+))?")
_QUOTED = re.compile(r"""["']([\w.]+)["']""")
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."
_OF_CONNECTORS = (_CONNECTORS, "vllm.v1.kv_offload.", "vllm.v1.simple_kv_offload.")
_DEEPEST = 12  # imports that lead to a class


@cache
def folder() -> Path | None:
    """Return the folder of the installed vLLM; None if there is none."""
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def vllm_version() -> str | None:
    """Return the version of the installed vLLM as it calls itself; None if there is none."""
    match = _VERSION.search(_text("_version.py"))
    return None if folder() is None else match[1] if match else "?"


def registered(path: str = CONNECTORS) -> dict[str, tuple[str, str]]:
    """Return the names that a factory of vLLM registers, with module and class; plugins may register more."""
    return {name: (module, cls) for name, module, cls in _REGISTERED.findall(_text(path))}


def transfer_keys() -> frozenset[str]:
    """Return the keys of this vLLM's ``KVTransferConfig``; empty if its source is not as expected."""
    return frozenset(_FIELD.findall(_text("config/kv_transfer.py").partition("class KVTransferConfig")[2]))


def _text(path: str) -> str:
    """Return one of vLLM's files; empty if it can't be read."""
    root = folder()
    try:
        return "" if root is None else (root / path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


# --- classes


def finder() -> Callable[[str, Any], type] | None:
    """Return what finds a class; None if the source of vLLM is not as expected."""
    return class_of if registered() else None


def class_of(name: str, module: Any) -> type:
    """Return what stands for a connector's class: its name, module and bases, and the source of its methods.

    Raises:
        NotUsableError: there is none, or only an import shows it.
    """
    if module is None:
        names = registered()
        if name not in names:
            raise not_registered(name, sorted(names))
        module, cls = names[name]
    else:
        module, cls = "kvobs.connector" if module in OURS else module, name
    try:
        is_missing = not isinstance(module, str) or spec_of(module) is None
    except (ImportError, ValueError):
        is_missing = True
    if is_missing:
        package = str(module).partition(".")[0]
        raise NotUsableError(kinds.MODULE.at("", name=show(name), module=show(module), package=package))
    if module == "kvobs.connector":
        if name != "MultiConnector":
            raise NotUsableError(kinds.CLASS_OF_KVOBS.at("", name=show(name)))
        return type(name, (), {"__module__": module})
    if (found_class := stub(module, cls)) is None:
        raise NotUsableError(kinds.NOT_READ.at("", name=show(name), module=module))
    if WORDS not in vars(found_class):
        setattr(found_class, WORDS, texts_of(found_class.__module__))
    return found_class


@cache
def stub(module: str, name: str, depth: int = 0) -> type | None:
    """Return a class whose methods are their source; None if its source, or that of a base, can't be found."""
    source = tree(module)
    for node in source.body if depth < _DEEPEST else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [_base(module, base, depth) for base in node.bases]
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            methods.pop("__init_subclass__", None)  # Python would call it
            with suppress(TypeError):  # by the order of its bases
                known = tuple(base for base in bases if base is not None)
                return type(name, known, {**methods, "__module__": module}) if len(known) == len(bases) else None
            return None
        match node:
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=other)) if alias == name:
                return stub(module, other, depth + 1)
    return stub(*_imports(module)[name], depth + 1) if depth < _DEEPEST and name in _imports(module) else None


def _base(module: str, base: ast.expr, depth: int) -> type | None:
    match base:
        case ast.Subscript(value=ast.Name(id="Generic" | "Protocol")) | ast.Name(id="ABC" | "object"):
            return object
        case ast.Name(id=name):
            return stub(module, name, depth + 1)
    return None


@cache
def _source(module: str) -> tuple[str, str]:
    """Return the text of a module and its file; nothing if it can't be read."""
    try:
        file = getattr(spec_of(module), "origin", None) or ""
        return (Path(file).read_text(encoding="utf-8"), file) if file.endswith(".py") else ("", "")
    except (OSError, ValueError, ImportError):
        return "", ""


@cache
def tree(module: str) -> ast.Module:
    with suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse(_source(module)[0])
    return ast.Module([], [])


@cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Return what a module imports from others, by its names there: the module, and the name in it."""
    (text, file), found = _source(module), dict[str, tuple[str, str]]()
    for dots, inner, names in _IMPORT.findall(text):
        level = len(dots) - file.endswith("__init__.py")
        above = module.split(".")[: -level or None] if dots else []
        of = ".".join([*above, *filter(None, [inner])])
        found.update({alias or name: (of, name) for name, alias in _NAME.findall(names)})
    return found


@cache
def sources(module: str) -> dict[str, str]:
    """Return the source of a connector's module, and of those that it imports and only connectors have, by name."""
    package = module.rpartition(".")[0]
    found, todo = dict[str, str](), [module]
    while todo:
        name = todo.pop()
        if name not in found and name.startswith((f"{package}.", module, *_OF_CONNECTORS)):
            found[name] = text = _source(name)[0]
            todo += [each for of, inner in _imports(name).values() for each in (of, f"{of}.{inner}")]
            todo += [word for word in _QUOTED.findall(text) if word.startswith(_OF_CONNECTORS)]  # of a factory
    return found


def texts_of(module: str) -> frozenset[str]:
    """Return the words in quotes in the source of a connector."""
    return frozenset(word for text in sources(module).values() for word in _QUOTED.findall(text))


def layout(method: ast.AST, *, has_hisparse: bool, is_mla: bool) -> str | None:
    """Return what ``get_required_kvcache_layout`` answers by its source: the first return whose test holds."""
    holds = {"use_mla": is_mla, "hisparse_config": has_hisparse, "model_config is None": False, "cls is ": False}
    for node in getattr(method, "body", ()):
        match node:
            case ast.If(test=test, body=[*_, (ast.Return() | ast.Raise()) as last]):
                known = [value for words, value in holds.items() if words in ast.unparse(test)]
                if known == [False]:
                    continue
            case ast.Return() as last:
                known = [True]
            case _:
                continue
        match last:
            case ast.Return(value=ast.Constant(value=str() | None as value)) if known == [True]:
                return value
        return "unknown"
    return "unknown"


def answer(method: ast.AST | None, extra: Mapping[str, Any]) -> bool | None:
    """Return what a method answers by its source, a constant or an option; None if it depends on more."""
    answers = [node.value for node in ast.walk(method or ast.Pass()) if isinstance(node, ast.Return)]
    match answers:
        case [ast.Constant(value=bool(value))]:
            return value
        case [ast.Call(args=[ast.Constant(value=str(key)), ast.Constant(value=default)])] if _is_of_extra(answers[0]):
            return bool(extra.get(key, default))
    return None


def _is_of_extra(call: Any) -> bool:
    return ast.unparse(call.func) == "extra_config.get"
