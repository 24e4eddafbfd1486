"""README and docs/ agree with the commands, the files and each other; test_docs_* have the rest."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

from dashboards.__main__ import BOARDS
from dashboards.alerts import ALERTS
from dashboards.rules import RECORDINGS, SOON_RECORDINGS
from dashboards.site import thresholds
from docs import tables
from docs.pages import ROOT, measured, table, write
from kvobs.cli import app
from kvobs.cli.commands import COMMANDS, load
from kvobs.schema import __version__
from kvobs.schema.signals import SIGNALS
from tests.connectors import faults
from tests.connectors.packages import version
from tests.gpu_path import cells
from tests.incidents.known import INCIDENTS, RESULTS, SEEN_S
from tests.suites import BY_NAME
from tests.support.messages import is_written
from tests.support.pages import TEXTS, Mention, every

LONGEST_README = 120  # lines: read in three minutes


def test_a_third_party_connector_has_its_version_and_its_tests() -> None:
    page = TEXTS["docs/runs.md"]
    each_time = re.findall(r"^\| (\w+) \| ([0-9.]+) \| each `make test-all` \|", page, re.MULTILINE)
    assert {name: version(name.lower()) for name, _ in each_time} == dict(each_time) != {}
    assert all((ROOT / f"tests/connectors/servers/test_{name.lower()}.py").exists() for name, _ in each_time)
    assert set(re.findall(r"\(lmcache ([0-9.]+)\)", page)) == {version("lmcache")}


def test_the_table_of_incidents_is_of_a_run_of_all_known_ones() -> None:
    results = json.loads(RESULTS.read_text())
    assert list(results) == list(INCIDENTS), "run `make test-all ONLY=incidents`"
    for title, incident in INCIDENTS.items():
        assert all(seconds <= SEEN_S for _, seconds in results[title]["at"].values()), title
        after_s = dict(results[title]["alerts"])
        assert not incident.alert or after_s[incident.alert] <= incident.within_s, title


def test_the_table_of_paths_is_of_a_run_right_in_all_cells() -> None:
    results = json.loads(cells.RESULTS.read_text())
    assert list(results) == [cell.title for cell in cells.EVERY], "run `make test-all ONLY=all-gpu-path`"
    assert [title for title, row in results.items() if "kvobs" in title and not (row["equal"] or row["ended"])] == []


def test_the_table_of_wrong_blocks_is_of_a_run_without_error() -> None:
    rows = json.loads(faults.RESULTS.read_text())
    for title, row in rows.items():
        assert row["wrong"] in (None, sum(row["outcomes"].get(name, 0) for name in ("lossy", "mismatch"))), title
    assert {row["at"] for row in rows.values()} == {"", "two ranks", "two engines"}, "run `make test-all ONLY=faults`"


def test_the_version_in_pages_is_the_packages_and_newest_release() -> None:
    shown = {found for text in TEXTS.values() for found in re.findall(r"\bkvobs[ :](\d+\.\d+\.\d+)", text)}
    assert shown == {__version__}
    releases = re.findall(r"^## (?!Unreleased)(\S+)", TEXTS["docs/changelog.md"], re.MULTILINE)
    assert releases[0] == __version__


def test_dashboards_page_counts_boards_rules_and_alerts() -> None:
    rules = len(RECORDINGS) + len(SOON_RECORDINGS)
    counts = f"ships five Grafana boards, {rules} recording rules, {len(ALERTS)} alerts"
    assert len(BOARDS) == 5
    assert counts in " ".join(TEXTS["docs/boards.md"].split())
    loaded = rules + len(ALERTS)
    assert f"rules of kvobs: {loaded} of {loaded}\n" in TEXTS["docs/check.md"]


@pytest.mark.parametrize("name", thresholds())
def test_the_table_of_alerts_names_every_threshold(name: str) -> None:
    assert f"(`{name}`)" in tables.alert_rules()


def test_titles_of_the_published_benchmark_are_those_of_its_code() -> None:
    page = TEXTS["docs/performance.md"]
    titles = re.findall(r"^\*\*(.*)\*\*$", page[measured(page, "bench")], re.MULTILINE)
    assert len(titles) >= 10
    assert [title for title in titles if not is_written(title, "tests/bench")] == []


PART = "before\n<!-- run: x -->\nold\n<!-- end -->\nafter\n"


def test_a_measurement_is_written_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PART)
    write(page, "x", "| new |")
    assert page.read_text() == PART.replace("old", "| new |")
    write(page, "x", "old\n")
    assert page.read_text() == PART


@pytest.mark.parametrize("text", [PART.replace("x", "y"), PART.replace("end", "other"), PART[:25]])
def test_a_part_that_is_not_there_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="the page has no part between '<!-- run: x -->' and '<!-- end -->'"):
        measured(text, "x")


@pytest.mark.parametrize(("page", "name"), [("performance", "gain"), ("performance", "bench"), ("reliability", "soak")])
def test_measurements_have_their_place(page: str, name: str) -> None:
    text = TEXTS[f"docs/{page}.md"]
    assert "| --- |" in text[measured(text, name)]


def test_cells_cannot_break_a_table() -> None:
    assert table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"


def anchors(text: str) -> set[str]:
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("link", [link for link in every(r"\]\(([^)\s]+)\)") if "://" not in link.what], ids=str)
def test_every_link_leads_somewhere(link: Mention) -> None:
    path, _, anchor = link.what.partition("#")
    target = (ROOT / link.page).parent / path if path else ROOT / link.page
    assert target.exists()
    if anchor:
        assert anchor in anchors(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", sorted(TEXTS.keys() - {"README.md", "docs/README.md", "docs/decisions/README.md"}))
def test_every_page_is_in_the_index(page: str) -> None:
    assert f"]({Path(page).name})" in TEXTS[str(Path(page).with_name("README.md"))]


@pytest.mark.parametrize("target", every(r"(?:^ {4}|`)(?:\S+=\S+ )*make ([a-z][a-z-]*)\b"), ids=str)
def test_every_make_target_exists(target: Mention) -> None:
    assert re.search(rf"^{target.what}:.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE), "make help lists it"


@pytest.mark.parametrize("named", every(r"\bmake test-all ONLY=(\"[^\"]+\"|[a-z0-9.-]+\b)"), ids=str)
def test_every_suite_exists(named: Mention) -> None:
    assert set(named.what.strip('"').split()) <= BY_NAME.keys()


def command_lines() -> list[Mention]:
    """Return the calls of the command, but not the headings that it prints."""
    found = every(r"(?:^ {4}(?:\$ )?|`|\$\()kvobs ([a-z][^`\n#|)]*)")
    return [line for line in found if "   the last" not in line.what]


def test_all_commands_are_described() -> None:
    assert {line.what.split()[0] for line in command_lines()} == set(COMMANDS)


@pytest.mark.parametrize("line", command_lines(), ids=str)
def test_every_command_and_its_options_exist(line: Mention) -> None:
    """What is behind ``--`` is another command."""
    name, *words = line.what.partition(" -- ")[0].split()
    command = load(name)
    while hasattr(command, "commands") and words:
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("-") and word != "-"} <= known


@pytest.mark.parametrize("line", [line for line in command_lines() if "--threshold " in line.what], ids=str)
def test_a_threshold_in_a_command_is_accepted(line: Mention, tmp_path: Path) -> None:
    chosen = re.findall(r"--threshold ([a-z_]+=[\d.]+)", line.what)
    words = [word for threshold in chosen for word in ("--threshold", threshold)]
    result = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path), *words])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", every(r"\b(kvobs_[a-z_]+[a-z])\b"), ids=str)
def test_every_metric_exists(name: Mention) -> None:
    known = {signal.name for signal in SIGNALS} | {"kvobs_version"}  # a field of `kvobs top --json`
    if name.page == "docs/changelog.md":
        known |= {"kvobs_stray_reports_total", "kvobs_self_seconds_total"}  # names of before
    known |= set(re.findall(r'Signal\(\s*"(\w+)"', TEXTS["docs/extending.md"]))  # which shows how to add one
    assert name.what in known or re.sub(r"_(bucket|count|sum)$", "", name.what) in known


def configurations(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every --kv-transfer-config within what a block of JSON or YAML holds."""
    if isinstance(value, str) and value.strip().startswith('{"kv_connector"'):
        yield json.loads(value)
    elif isinstance(value, dict) and "kv_connector" in value:
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from configurations(item)


def blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    for page, text in TEXTS.items():
        for number, (kind, block) in enumerate(
            re.findall(r"^```(json|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        ):
            parsed = json.loads(block) if kind == "json" else yaml.safe_load(block)
            for config in configurations(parsed):
                yield f"{page}, block {number}", config


BLOCKS = list(blocks())


@cache
def checked(config: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["check", config, "--json"])
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_configurations_are_found() -> None:
    pages_with_one = {name.partition(",")[0] for name, _ in BLOCKS}
    assert pages_with_one >= {"docs/quickstart.md", "docs/engine.md", "docs/deployment.md"}


@pytest.mark.parametrize(("name", "config"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_every_configuration_is_right(name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvobs.export.listening.listen", Mock())  # another engine may have it here
    found = checked(json.dumps(config))
    assert found["errors"] == []
    # In a pod it must listen on more than loopback; the pages say how to close it.
    assert [warning for warning in found["warnings"] if "listens on '0.0.0.0'" not in warning["found"]] == []
    assert config["kv_connector_module_path"] == "kvobs"


def test_the_readme_is_short_with_installation_demo_and_tests() -> None:
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= LONGEST_README
    assert re.findall(r"^    (\S.*)$", readme, re.MULTILINE)[0].startswith("pip install .")
    assert re.findall(r"^    (make \S+)$", readme, re.MULTILINE) == ["make demo", "make test"]
