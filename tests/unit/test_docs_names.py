"""What pages and docstrings name exists: files, modules, commands, metrics, headings, boards and their panels."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from dashboards.__main__ import BOARDS
from docs.pages import ROOT
from kvobs.schema.signals import SIGNALS, Scope
from tests.support.pages import ALL_TEXTS, TEXTS, Mention, every, paragraphs

SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in ("kvobs", "dashboards", "docs", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
DOCSTRINGS = {name: docstring for name, text in SOURCES.items() if (docstring := ast.get_docstring(ast.parse(text)))}
ALL_PROSE = {**DOCSTRINGS, **ALL_TEXTS}
CODE = {name: text for name, text in SOURCES.items() if name.startswith("kvobs/")}
FILES = {*SOURCES, *ALL_TEXTS}
VLLM = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OUTSIDE_FENCES = {page: FENCE.sub("", text) for page, text in ALL_TEXTS.items()}


IN_PROSE = [*every(r"([\w/]+\.py)\b", OUTSIDE_FENCES), *every(r"([\w./-]*\w\.(?:py|md))\b", DOCSTRINGS)]


@pytest.mark.parametrize("file", IN_PROSE, ids=str)
def test_a_file_in_a_page_or_a_docstring_exists(file: Mention) -> None:
    of_vllm = file.what.startswith("vllm/") and (VLLM.parent / file.what).exists()
    assert of_vllm or any(f"/{path}".endswith(f"/{file.what}") for path in FILES)


@pytest.mark.parametrize("module", every(r"python -m ((?:kvobs|tests|docs|dashboards)[\w.]*)", ALL_PROSE), ids=str)
def test_a_module_that_is_run_exists(module: Mention) -> None:
    path = module.what.replace(".", "/")
    assert {f"{path}.py", f"{path}/__main__.py"} & FILES


@pytest.mark.parametrize("path", every(r"`((?:kvobs|tests|docs|dashboards)/[\w./-]*?)`", ALL_PROSE), ids=str)
def test_a_path_exists(path: Mention) -> None:
    assert (ROOT / path.what).exists()


@pytest.mark.parametrize("module", every(r"``(kvobs(?:\.[a-z_]+)+)``", ALL_PROSE), ids=str)
def test_a_module_exists(module: Mention) -> None:
    path = ROOT / module.what.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").exists() or path.with_suffix(".c").exists()


@pytest.mark.parametrize(
    ("page", "beginning"),
    [("docs/exporter.md", "Only the exporter has"), ("docs/metrics.md", "- **Exporter only**")],
)
def test_the_metrics_of_the_exporter_are_all_named(page: str, beginning: str) -> None:
    (text,) = (part for part in paragraphs(TEXTS[page]) if part.startswith(beginning))
    named = re.findall(r"`(kvobs_\w+)`", text.partition(". ")[0])
    assert sorted(named) == sorted(signal.name for signal in SIGNALS if signal.scope is Scope.EXPORTER)


SHOWN = [json.loads(path.read_text()) for path in sorted((ROOT / "dashboards/generated/boards").glob("*.json"))]
PANELS = [panel for board in SHOWN for top in board["panels"] for panel in (top, *top.get("panels", ()))]
VARIABLES = {variable.get("label") or variable["name"] for board in SHOWN for variable in board["templating"]["list"]}
TITLES = {
    *(board["title"].removeprefix("kvobs / ") for board in SHOWN),
    *(re.sub(r" \([^)]*\)$", "", panel["title"]) for panel in PANELS if panel.get("title")),
    *VARIABLES,
    *(f"{variable}: All" for variable in VARIABLES),
}
OTHERS = {"All", "Critical", "General", "In process", "Stock"}
"""A value of variables, a severity, Grafana's folder, two words that runs.md explains."""


def test_boards_are_found() -> None:
    assert len(SHOWN) == len(BOARDS)


@pytest.mark.parametrize("title", every(r"(?<!\*)\*([A-Z][^*\n]{2,60})\*(?!\*)", ALL_TEXTS), ids=str)
def test_a_title_in_a_page_is_on_a_board(title: Mention) -> None:
    assert title.what in TITLES | OTHERS
