"""`kvobs whatif` as people run it, on files that kvobs's own code wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.cli.whatif.command import POLICIES
from kvobs.testing import BLOCK, Rig, Script
from tests.support.recording_rigs import Known, recording_rig


def run(*arguments: object, columns: int = 80) -> tuple[int, str]:
    """Run the command; return its exit code, and all that it printed."""
    result = CliRunner().invoke(cli.app, ["whatif", *map(str, arguments)], env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timeline"


@pytest.fixture
def rig(folder: Path, a: Script, b: Script) -> Rig:
    """Four requests of which "one" has two blocks and "two" three, and one that only "two" has."""
    rig = recording_rig(folder, a, b)
    rig.connector._side._gains._cost = Known()
    names = [f"r{i}" for i in range(4)]
    a.offers |= dict.fromkeys(names, (2 * BLOCK, True))
    b.offers |= dict.fromkeys([*names, "only"], (3 * BLOCK, True))
    for name in [*names, "only"]:
        rig.add(name)
        rig.step()
        (b if name == "only" else a).say(0, received=name)
        rig.run(4)
    assert rig.scheduler.requests == {}
    return rig


@pytest.mark.usefixtures("rig")
def test_it_shows_what_was_and_what_would_have_been(folder: Path) -> None:
    code, printed = run(folder, "--policy", "longest")
    assert code == 0, printed
    lines = printed.splitlines()
    assert re.fullmatch(r"was      load_policy first; connectors one, two; \d\d:.* to \d\d:.*", lines[0])
    assert lines[1] == "what if  load_policy longest; connectors one, two"
    rows = {line[:20].strip(): line[20:].split() for line in lines[3:]}
    assert rows["tokens loaded"] == [f"{8 * BLOCK + 3 * BLOCK}"] * 2 + [f"{15 * BLOCK}"]
    assert rows["one"] == [f"{8 * BLOCK}"] * 2 + ["0"]
    assert rows["two"] == [f"{3 * BLOCK}"] * 2 + [f"{15 * BLOCK}"]
    assert "offers known for 5 of 5 lookups" in lines
    assert "another choice in 4 of them" in lines
    assert "first token predicted for 5 of 5 requests" in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("rig")
def test_as_json_it_is_one_object(folder: Path) -> None:
    code, printed = run(folder, "--order", "two", "--json")
    assert code == 0, printed
    found = json.loads(printed)
    assert found["settings"]["was"]["connectors"] == ["one", "two"]
    assert found["settings"]["what_if"]["connectors"] == ["two"]
    assert found["lookups"] == {"recorded": 5, "known": 5, "unknown": {}, "repeated": 5, "changed": 4}
    assert found["was"]["tokens_by_connector"] == {"one": 8 * BLOCK, "two": 3 * BLOCK}
    assert found["what_if"]["tokens"] == 15 * BLOCK
    assert found["what_if"]["saved_s"] == pytest.approx(5 * 3 * BLOCK * 1e-3, rel=0.01)
    assert 0 < found["was"]["first_token_p50_s"] <= found["was"]["first_token_p95_s"]


@pytest.mark.usefixtures("rig")
def test_without_settings_the_models_own_error_is_all_there_is(folder: Path) -> None:
    found = json.loads(run(folder, "--json")[1])
    what_if, was, model = (found[column] for column in ("what_if", "was", "model"))
    assert {key: n for key, n in what_if.items() if key[:5] != "first"}.items() <= model.items()
    assert {key: n for key, n in what_if.items() if key[:5] == "first"}.items() <= was.items()
    assert found["lookups"]["changed"] == 0


@pytest.mark.usefixtures("rig")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--order", "two,three"], "--order: found connector 'three', allowed: one, two"),
        (["--order", "one,one"], "--order: found 'one,one', allowed: each connector once"),
        (["--policy", "best"], "--policy: found 'best', allowed: 'first'"),
        (["--lookup-timeout-ms", "0"], "--lookup-timeout-ms: found 0.0, allowed: greater than 0"),
        (["--min-tokens", "one"], "--min-tokens: found 'one', allowed: NAME=N with a whole number"),
        (["--min-tokens", "one=0"], "--min-tokens: found 'one=0', allowed: NAME=N with a whole number"),
        (["--min-tokens", "cpu=5"], "--min-tokens: found connector 'cpu', allowed: one, two"),
    ],
)
def test_a_mistake_says_what_was_found_and_what_is_allowed(folder: Path, arguments: list[str], says: str) -> None:
    code, printed = run(folder, *arguments, columns=200)
    assert code == 2
    assert says in re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", printed))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "first"])
def test_policies_that_compare_all_answers_need_all_answers(folder: Path, a: Script, b: Script, policy: str) -> None:
    recording_rig(folder, a, b, options={"wait_for": "earlier"})
    code, printed = run(folder, "--policy", policy, columns=200)
    assert code == 2
    assert f"found '{policy}', which compares all answers, and the recorded wait_for is 'earlier'" in printed


def test_what_cannot_be_compared_is_said(folder: Path, tmp_path: Path, a: Script, b: Script) -> None:
    assert run(tmp_path / "no") == (1, f"{tmp_path / 'no'} can't be read: No such file or directory\n")
    recording_rig(folder, a, b)
    assert run(folder) == (1, "no lookup is recorded from its begin to its end\n")


def test_a_recording_of_an_older_kvobs_is_named(folder: Path, a: Script) -> None:
    recording_rig(folder, a)
    (path,) = folder.glob("0-scheduler-*")
    path.chmod(0o600)
    content = path.read_bytes()
    path.write_bytes(content[:8] + (1).to_bytes(4, "little") + content[12:].replace(b'"settings"', b'"unknown1"', 1))
    code, printed = run(folder, columns=300)
    assert code == 1
    assert f"{path} is of an older kvobs, which did not record what lookups found" in printed.replace("\n", "")


@pytest.mark.usefixtures("rig")
def test_min_tokens_are_those_of_the_option(folder: Path) -> None:
    """Together with what was recorded."""
    found: dict[str, Any] = json.loads(run(folder, "--min-tokens", f"one={2 * BLOCK + 1}", "--json")[1])
    assert found["settings"]["what_if"]["min_tokens"] == {"one": 2 * BLOCK + 1}
    assert found["what_if"]["tokens_by_connector"] == {"two": 15 * BLOCK}
