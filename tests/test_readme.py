"""The README says what is: its options, metrics, commands and configuration are compared with the code."""

import json
import re
from pathlib import Path

import pytest

from kvobs.config import Options, read
from kvobs.signals import CALL_DURATION, SIGNALS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    section = README.split(f"# {heading}\n", 1)[1]
    lines = section[section.index("\n|") + 1 :].splitlines()
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_table_of_options_is_complete_and_true() -> None:
    expected = []
    for name, field in Options.model_fields.items():
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        expected.append([f"`{name}`", f"`{json.dumps(default)}`", field.description])
    assert rows("Options") == expected


def test_the_table_of_metrics_is_complete_and_true() -> None:
    expected = []
    for signal in SIGNALS:
        labels = "; ".join(
            f"`{label}`" + (f": {', '.join(values)}" if len(values) and values != CALL_DURATION.labels["hook"] else "")
            for label, values in signal.labels.items()
        )
        expected.append([f"`{signal.name}`", signal.kind.value, labels, signal.help])
    assert rows("Metrics") == expected


def test_the_configuration_is_valid() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    config = json.loads(block)
    assert read(config["kv_connector_extra_config"]).names == ("cpu", "nixl")
    assert config["kv_connector_module_path"] == "kvobs"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)\b", README))))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|kvobs)/[\w./]+?)`", README))))
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+\.py)`", README))))
def test_every_module_exists(name: str) -> None:
    assert (ROOT / "kvobs" / name).exists()
