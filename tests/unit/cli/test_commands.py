"""The command `kvobs`, as a person runs it: real processes and exit codes; the demo is in tests/engine/test_demo.py."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.schema import __version__


def kvobs(*arguments: str) -> tuple[int, str]:
    """Run the command in this process and return its exit code and all it printed."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.output


COMMANDS = ("check", "top", "timeline", "topology", "demo", "dashboards export")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    """Uncut; a bare `kvobs` is a call for help."""
    listed = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"}).output.partition("Commands:")[2]
    assert all(f"  {command.partition(' ')[0]} " in listed for command in COMMANDS)
    assert "..." not in listed
    assert kvobs("--version") == (0, f"kvobs {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_and_whole_names_at_80_columns(command: str) -> None:
    result = CliRunner().invoke(cli.app, [*command.split(), "-h"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0
    assert f"  kvobs {command} " in result.output.partition("Examples:")[2] or command == "demo"
    assert max(map(len, result.output.splitlines())) <= 80
    found: Any = get_command(cli.app)
    for name in command.split():
        found = found.commands[name]
    for option in (option for parameter in found.params for option in parameter.opts if option.startswith("-")):
        assert re.search(rf"{option}\b", result.output), option
    assert "\u2026" not in result.output


def refused(*arguments: str) -> str:
    """Return the text, without colours, with which wrong usage is refused."""
    code, output = kvobs(*arguments)
    assert code == 2
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", output).split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("--port 70000", "--port"), ("--requests 3", "--requests"), ("--prot 1", "--prot"),
     ("--repeat", "requires --keep"), ("--host ::1", "127.0.0.1 or 0.0.0.0")],
)  # fmt: skip
def test_options_of_the_demo_that_make_no_sense_are_refused(arguments: str, says: str) -> None:
    assert says in refused("demo", *arguments.split())


def test_without_vllm_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _name: None)
    code, output = kvobs("demo")
    assert code == 1
    assert "kvobs demo needs vLLM: pip install 'kvobs[engine]'" in output


PAIR = ("--prefill-tp", "4", "--decode-tp", "2")


def test_topology_prints_json_for_scripts() -> None:
    code, output = kvobs("topology", *PAIR, "--kv-heads", "2", "--decode-block-size", "32", "--json")
    assert code == 0
    assert json.loads(output) == {
        "prefill": {"tp_size": 4, "block_size": 16, "ranks_per_head": 2, "unread": [[1, 1], [3, 3]]},
        "decode": {"tp_size": 2, "block_size": 32, "ranks_per_head": 1},
        "reads": [
            {"rank": 0, "heads": [0, 0], "sources": [{"rank": 0, "heads": [0, 0]}], "blocks": 2},
            {"rank": 1, "heads": [1, 1], "sources": [{"rank": 2, "heads": [1, 1]}], "blocks": 2},
        ],
    }


@pytest.mark.parametrize(
    ("config", "same_as"),
    [({"num_key_value_heads": 8}, ["--kv-heads", "8"]), ({"kv_lora_rank": 512}, ["--mla", "--kv-heads", "128"])],
    ids=["heads", "mla"],
)
def test_topology_takes_the_numbers_from_a_model(tmp_path: Path, config: dict[str, int], same_as: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, output = kvobs("topology", *PAIR, "--model", str(tmp_path))
    assert (code, output) == kvobs("topology", *PAIR, *same_as)
    assert code == 0
    assert ("latent" in output) is ("--mla" in same_as)
    (tmp_path / "config.json").write_text('{"num_key_value_heads": 3}')
    code, output = kvobs("topology", *PAIR, "--model", str(tmp_path))
    assert code == 1
    assert output.startswith("--prefill-tp 4 with 3 KV heads")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("3 --decode-tp 4 --kv-heads 8", r"--prefill-tp 3 with 8 KV heads \(--kv-heads or --model\): one must be"),
        ("4 --decode-tp 3 --kv-heads 8", "--decode-tp 3 with 8 KV heads .*: one must"),
        ("4 --decode-tp 3 --kv-heads 12", "--prefill-tp 4 with --decode-tp 3: one must"),
        ("4 --decode-tp 3 --mla", "--prefill-tp 4 with --decode-tp 3: one must"),
        ("4 --decode-tp 4 --mla --prefill-block-size 32", "--decode-block-size 16 with .* 32: the first"),
        ("4 --decode-tp 4 --model /nowhere", "/nowhere/config.json: No such file.*; give the folder"),
    ],
)
def test_topology_says_which_numbers_do_not_fit(arguments: str, says: str) -> None:
    """In one line on stderr, with exit code 1, nothing on stdout and no traceback."""
    result = CliRunner().invoke(cli.app, ["topology", "--prefill-tp", *arguments.split(), "--json"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(f"{says}.*\n", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("4 --decode-tp 2", "--kv-heads, --mla, --model: give"),
        *((f"4 --decode-tp 2 --model . {more}", "--model: give it without") for more in ("--mla", "--kv-heads 8")),
        ("4 --decode-tp 2 --kv-heads 0", "--kv-heads"), ("4 --decode-tp 0 --mla", "--decode-tp"),
        ("1025 --decode-tp 1 --mla", "--prefill-tp"), ("4 --mla", "--decode-tp"),
    ],
)  # fmt: skip
def test_topology_refuses_options_that_make_no_pair(arguments: str, says: str) -> None:
    assert says in refused("topology", "--prefill-tp", *arguments.split())


def test_topology_needs_no_vllm() -> None:
    """It runs wherever kvobs is installed; piped, without colours."""
    code = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from kvobs.cli import app; app()"
    command = [sys.executable, "-c", code, "topology", *PAIR, "--kv-heads", "8"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert out.stdout.startswith("8 KV heads, no copies; ")
    assert "\x1b" not in out.stdout
