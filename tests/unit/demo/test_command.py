"""The options of `kvobs demo`; what it does is in tests/engine/test_demo.py."""

import re

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.demo import command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("--port 70000", "--port"), ("--requests 3", "--requests"), ("--prot 1", "--prot"),
     ("--repeat", "requires --keep"), ("--host ::1", "127.0.0.1 or 0.0.0.0")],
)  # fmt: skip
def test_options_of_the_demo_that_make_no_sense_are_refused(arguments: str, says: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments.split()])
    assert result.exit_code == 2
    assert says in " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def test_without_vllm_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr == "kvobs demo needs vLLM: pip install 'kvobs[engine]' (for CPUs)\n"
