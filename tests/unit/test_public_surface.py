"""The public names are those of ``__all__``: each exists and is described, and none is public by accident."""

import ast
import inspect
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from docs.pages import FOLDER
from kvobs import testing
from kvobs.testing import rig, scripted

INTERNAL = {
    "kvobs.schema.config": {"explain", "is_enabled", "numbers", "validate"},  # with findings; `read` raises them
    "kvobs.schema.signals": {
        *("Series", "slot", "slots", "find", "word", "series_words"),  # words of a page
        "labelnames",  # of what the exporter serves
        "no_estimate",  # a text of commands
        *("is_timed", "hook_label"),  # about hooks; they are here because labels need them
    },
    "kvobs.schema.spans": {"Record", "observed_in"},  # a span on its way to the exporter
    "kvobs.testing": {"base_config", "wrap_hooks"},  # what the other configurations are made of; what a rig does
}
"""Names without underscore that kvobs's own modules share and others should not use."""

HOMES = {
    "__version__": "kvobs.schema",
    "BLOCK": "kvobs.testing.rig",
    "ROUTERS": "kvobs.testing.rig",
}
"""Where constants are assigned that a public module imports."""

PUBLIC = [import_module(name) for name in (
    "kvobs", "kvobs.blocks", "kvobs.aggregation", "kvobs.topology", "kvobs.schema.config", "kvobs.schema.signals",
    "kvobs.schema.spans", "kvobs.testing",
)]  # fmt: skip

NAMES = [(module, name) for module in PUBLIC for name in module.__all__]


def own(module: ModuleType) -> set[str]:
    """Return the classes and functions of a module, without those that it imports; all of the package for tests."""
    parts = [module, rig, scripted] if module is testing else [module]
    return {
        name
        for part in parts
        for name, value in vars(part).items()
        if callable(value) and getattr(value, "__module__", None) == part.__name__
    }


def described_constants(module: ModuleType) -> set[str]:
    """Return the names that are assigned in a module's file and followed by a string that describes them."""
    assert module.__file__
    body = ast.parse(Path(module.__file__).read_text()).body
    found = set()
    for node, after in pairwise(body):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module.__name__}.{name}" for module, name in NAMES])
def test_a_public_name_exists_and_is_described(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__doc__ or "").strip()
        assert not (value.__doc__ or "").startswith(f"{name}("), "a dataclass's own text is none"
    else:
        assert name in described_constants(import_module(HOMES.get(name, module.__name__)))


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_nothing_is_public_by_accident(module: ModuleType) -> None:
    without_underscore = {name for name in own(module) if not name.startswith("_")}
    assert without_underscore - set(module.__all__) == INTERNAL.get(module.__name__, set())
    assert len(module.__all__) == len(set(module.__all__))
    assert module.__doc__


def test_the_documentation_names_the_public_modules() -> None:
    (listed,) = re.findall(r"^Public are ([^;]*);", (FOLDER / "architecture.md").read_text(), re.MULTILINE)
    assert re.findall(r"`([\w.]+)`", listed) == [module.__name__ for module in PUBLIC]
