"""The command `kvobs`, as a person runs it: help, and what is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.schema import __version__


def kvobs(*arguments: str) -> tuple[int, str]:
    """Run the command in this process and return its exit code and all it printed."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.output


COMMANDS = ("check", "top", "summary", "trace", "timeline", "demo", "dashboards export")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    """Uncut; a bare `kvobs` is a call for help."""
    listed = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"}).output.partition("Commands:")[2]
    assert all(f"  {command.partition(' ')[0]} " in listed for command in COMMANDS)
    assert "..." not in listed
    assert kvobs("--version") == (0, f"kvobs {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_whole_names_at_80_columns(command: str) -> None:
    result = CliRunner().invoke(cli.app, [*command.split(), "-h"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    assert f"  kvobs {command} " in result.output.partition("Examples:")[2] or command == "demo"
    assert max(map(len, result.output.splitlines())) <= 80
    name, *rest = command.split()
    found = cli.load(name)
    for name in rest:
        found = found.commands[name]
    for option in (option for parameter in found.params for option in parameter.opts if option.startswith("-")):
        assert re.search(rf"{option}\b", result.output), option
    assert "\u2026" not in result.output


def test_a_window_without_a_size_gets_the_usual_one() -> None:
    result = CliRunner().invoke(cli.app, ["check", "{}"], env={"COLUMNS": "0"})
    assert "error: kv_role: is missing" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["check", "{}"], ["check", "{}", "--json"]])
def test_a_full_disk_is_an_error_in_one_line(arguments: list[str]) -> None:
    """Click itself takes care of a closed pipe only."""
    command = [sys.executable, "-c", "from kvobs.cli import app; app()", *arguments]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "the output can't be written: No space left on device\n")


def test_a_file_at_its_limit_is_such_an_error(tmp_path: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from kvobs.cli import app; app()"
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", code, "--version"]
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "the output can't be written: File too large\n")


def test_a_command_is_imported_when_it_is_used() -> None:
    """A list of commands needs no module of a command."""
    hidden = ("kvobs.cli.output", "kvobs.demo", "vllm", "rich", "numpy", "prometheus_client")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from kvobs.cli import app; app()"
    subprocess.run([sys.executable, "-c", code, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
