"""``kvobs check`` as a person or a script runs it: what goes where, and the exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvobs.cli import commands as cli
from kvobs.cli.check.rewrite import rewrite

STOCK = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "connectors": [
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
            },
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        ]
    },
}
GOOD = rewrite(STOCK)
BAD = {**GOOD, "kv_rol": 1, "kv_load_failure_policy": "maybe"}


def run(config: Any, *arguments: str, stdin: str | None = None) -> Result:
    text = config if isinstance(config, str) else json.dumps(config)
    return CliRunner().invoke(cli.app, ["check", text, *arguments], input=stdin, env={"COLUMNS": "160"})


def test_a_good_configuration_is_printed_and_ends_well() -> None:
    result = run(GOOD)
    assert result.exit_code == 0
    assert "routes between vLLM" in result.stdout
    rows = {line[:24].strip(): line[24:].split() for line in result.stdout.splitlines()}
    assert rows["class"] == ["OffloadingConnector", "NixlPullConnector"]
    assert rows["requires KV delivery"][:2] in (["no", "yes"], ["NixlConnector"])
    assert "mistake:" not in result.stdout


def test_where_metrics_and_spans_go_is_printed() -> None:
    spans = ("--otlp-traces-endpoint", "http://collector:4317")
    cells = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in run(GOOD, *spans).stdout.splitlines())
    rows = dict(cell for cell in cells if len(cell) == 2)
    assert rows["metrics go to"] == "/metrics of vLLM's API server"
    assert rows["spans go to"] == "http://collector:4317, from vLLM's API server"
    report = json.loads(run(GOOD, *spans, "--json").stdout)
    assert (report["metrics_go_to"], report["spans_go_to"]) == (rows["metrics go to"], rows["spans go to"])


def test_mistakes_are_printed_with_their_fix_and_end_with_status_1() -> None:
    result = run(BAD)
    assert result.exit_code == 1
    flat = " ".join(result.stdout.split())
    assert "mistake: kv_rol: unknown key, allowed: " in flat
    assert "Fix: use 'kv_role'." in flat
    assert "mistake: kv_load_failure_policy: found 'maybe', allowed: 'recompute' or 'fail'. Fix: " in flat


def test_json_is_all_there_is_on_standard_output() -> None:
    noted = json.loads(run(BAD, "--json").stdout)
    assert [mistake["path"] for mistake in noted["mistakes"]] == ["kv_load_failure_policy", "kv_rol"]
    assert [child["name"] for child in noted["connectors"]] == ["OffloadingConnector", "NixlConnector"]
    assert "wait_for_layer_load" in noted["connectors"][0]["facts"]["empty_hooks"]


def test_what_is_rewritten_is_all_there_is_and_passes() -> None:
    result = run(STOCK, "--rewrite")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == GOOD
    assert result.stderr.strip() == ""
    again = run(result.stdout, "--rewrite")
    assert again.stdout == result.stdout
    assert run(result.stdout).exit_code == 0


def test_what_has_mistakes_is_not_rewritten() -> None:
    result = run({**STOCK, "kv_role": "both"}, "--rewrite")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "mistake: kv_role: found 'both'" in " ".join(result.stderr.split())


def test_of_a_stock_configuration_it_prints_that_kvobs_is_not_in_it() -> None:
    result = run(STOCK)
    assert result.exit_code == 0
    assert result.stdout.startswith("kvobs is not in this configuration. With --rewrite it would route between vLLM")
    assert "warning: kv_connector_module_path: " in result.stdout


def test_a_configuration_comes_from_a_pipe_too() -> None:
    noted = json.loads(run("-", "--json", stdin=json.dumps(BAD)).stdout)
    assert len(noted["mistakes"]) == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("/no/such/file.json", "/no/such/file.json: No such file or directory"),
        ('{"kv_role": }', "not valid JSON: Expecting value: line 1"),
        ("[]", "is a list, needs an object"),
        ("/bin/true", "/bin/true is not UTF-8 text"),
        ("/tmp", "/tmp: Is a directory"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--json",), ("--rewrite",)])
def test_what_can_not_be_read_is_a_mistake_too(config: str, says: str, option: tuple[str, ...]) -> None:
    result = run(config, *option)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output
    if option == ("--json",):
        assert json.loads(result.stdout)["mistakes"][0]["path"] == "CONFIG"


def test_the_options_of_vllm_are_read() -> None:
    pair = ("--disable-log-stats", "--otlp-traces-endpoint", "http://collector:4317")
    assert run(GOOD, *pair).exit_code == 1
    assert run(GOOD, *pair[:1]).exit_code == 0
    noted = json.loads(run(GOOD, *pair[1:], "--api-server-count", "2", "--json").stdout)
    assert noted["tracing"] == "requests"
    assert noted["metrics_go_to"].endswith(", from kvobs's exporter, which starts by itself: --api-server-count")


def test_it_says_who_reads_from_whom() -> None:
    result = run(GOOD, "--tensor-parallel-size", "4", "--remote-tensor-parallel-size", "2", "--kv-heads", "8")
    assert "8 KV heads, no copies; 2 decode ranks to a prefill rank; blocks of 16 tokens." in result.stdout
    noted = json.loads(
        run({**GOOD, "kv_role": "kv_producer"}, "--tp", "4", "--remote-tp", "2", "--mla", "--json").stdout
    )
    assert (noted["readers"]["prefill"]["tp_size"], noted["readers"]["decode"]["tp_size"]) == (4, 2)


def test_engines_that_do_not_fit_end_with_status_1() -> None:
    result = run(GOOD, "--tp", "4", "--remote-tp", "3", "--kv-heads", "8")
    assert result.exit_code == 1
    assert "mistake: --tensor-parallel-size, --remote-tensor-parallel-size: TP size 3" in result.stdout


def test_the_models_own_numbers_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    noted = json.loads(run(GOOD, "--tp", "4", "--remote-tp", "2", "--model", str(tmp_path), "--json").stdout)
    assert noted["readers"]["prefill"]["ranks_per_head"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--remote-tp", "2"], "--kv-heads, --mla, --model"),
        (["--model", ".", "--mla"], "--kv-heads, --mla, --model"),
        (["--model", "/nowhere"], "/nowhere/config.json"),
        (["--tp", "0"], "--tp"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], says: str) -> None:
    result = run(GOOD, *arguments)
    assert result.exit_code == 2
    assert says in result.output


WITHOUT_VLLM = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from kvobs.cli import app; app()"


def without_vllm(config: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_VLLM, "check", json.dumps(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_without_vllm_it_says_what_the_text_says_and_that_this_is_all() -> None:
    result = without_vllm(GOOD)
    assert result.returncode == 0, result.stderr
    assert "vLLM (not installed here)" in " ".join(result.stdout.split())
    noted = json.loads(without_vllm(BAD, "--json").stdout)
    assert noted["vllm"] is None
    assert {mistake["path"] for mistake in noted["mistakes"]} == {"kv_load_failure_policy", "kv_rol"}
    assert [child["facts"] for child in noted["connectors"]] == [None, None]
    assert "vLLM is not installed here" in noted["off"]["classes"]


def test_rewriting_needs_no_vllm() -> None:
    result = without_vllm(STOCK, "--rewrite")
    assert (result.returncode, json.loads(result.stdout)) == (0, GOOD)


def test_the_output_of_vllm_and_of_libraries_is_discarded() -> None:
    """Where the command imports vLLM, and a connector whose library is missing."""
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    command = [str(Path(sys.executable).parent / "kvobs"), "check", json.dumps(mooncake), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(result.stdout)["connectors"][0]["kv_connector"] == "MooncakeConnector"
    assert result.stderr == ""


COMMAND = (sys.executable, "-c", "from kvobs.cli import app; app()", "check")


def with_vllm(code: str, folder: Path) -> dict[str, str]:
    """Return an environment with a vLLM that is this code."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "_version.py").write_text("__version__ = '0.32.0'")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


def test_what_needs_no_vllm_is_printed_before_it_is_imported(tmp_path: Path) -> None:
    """And Ctrl-C ends the import, without a traceback."""
    environment = with_vllm("import time; time.sleep(600)", tmp_path)
    bad = {**GOOD, "kv_load_failure_policy": "maybe"}
    process = subprocess.Popen(
        [*COMMAND, json.dumps(bad)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith("mistake: kv_load_failure_policy: "):
            break
    assert "routes between vLLM 0.32.0 and 2 connectors" in seen
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in process.communicate()[1]


NOISE = "import os; print('noise'); os.write(1, b'noise'); os.write(2, b'noise'); "


@pytest.mark.parametrize("is_stderr_closed", [True, False])
def test_a_vllm_that_can_not_be_imported_is_a_warning(tmp_path: Path, is_stderr_closed: bool) -> None:
    environment = with_vllm(f"{NOISE}raise OSError('libcuda.so.1 is missing')", tmp_path)
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if is_stderr_closed else []
    command = [*closed, *COMMAND, json.dumps(GOOD)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "noise" not in result.stdout
    assert "warning: vLLM: can't be imported here" in result.stdout
    assert "OSError: libcuda.so.1 is missing" in result.stdout
    assert result.stdout.splitlines()[-1] == "no mistakes, 1 warning; the connectors' classes were not checked"


def test_one_finding_is_one_line_in_a_pipe() -> None:
    result = CliRunner().invoke(cli.app, ["check", json.dumps(BAD)])
    noted = [line for line in result.stdout.splitlines() if line.startswith(("mistake: ", "warning: "))]
    assert len(noted) == 2
    assert all("Fix: " in line and line.endswith(".") for line in noted)
    assert max(map(len, noted)) > 200


@pytest.mark.parametrize(
    ("config", "last"),
    [(GOOD, "no mistakes"), (BAD, "2 mistakes"), (STOCK, "no mistakes, 1 warning")],
)
def test_the_last_line_is_the_verdict(config: Any, last: str) -> None:
    assert run(config).stdout.splitlines()[-1] == last


def test_a_mistake_is_printed_once() -> None:
    assert run(BAD).stdout.count("mistake: kv_rol:") == 1


def test_no_character_is_too_much_for_an_ascii_terminal() -> None:
    config = json.dumps({"kv_connector": "Ünïcode", "kv_role": "ßoth"}, ensure_ascii=False)
    command = [sys.executable, "-c", WITHOUT_VLLM, "check", config]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert "Traceback" not in result.stderr
    assert result.returncode == 1
    assert "\\xdcn\\xefcode" in result.stdout


def test_the_options_beside_the_configuration_count() -> None:
    config = f"--kv-transfer-config '{json.dumps(GOOD)}'"
    line = f"vllm serve m --disable-log-stats --otlp-traces-endpoint http://c:4317 {config}"
    noted = json.loads(run(line, "--json").stdout)
    assert [mistake["path"] for mistake in noted["mistakes"]] == ["--disable-log-stats, --otlp-traces-endpoint"]
    result = run(f"vllm serve m -tp four {config}")
    assert result.exit_code == 1
    assert "--tensor-parallel-size beside the configuration is not a whole number above 0" in result.stdout


def test_a_missing_library_does_not_keep_it_from_being_rewritten() -> None:
    result = run({"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}, "--rewrite")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["kv_connector_module_path"] == "kvobs"
