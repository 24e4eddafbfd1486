"""``kvobs check`` as a person or a script runs it: what goes where, and the exit status."""

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
from kvobs.schema.config import PATH
from tests.support.waiting import eventually

BOTH = {"kv_role": "kv_both"}
CPU = {"kv_connector": "OffloadingConnector", PATH: {"cpu_bytes_to_use": 1 << 30}, **BOTH}
NIXL = {"kv_connector": "NixlConnector", **BOTH}
STOCK = {"kv_connector": "MultiConnector", PATH: {"connectors": [CPU, NIXL]}, **BOTH}
GOOD = rewrite(STOCK)
BAD = {**GOOD, "kv_rol": 1, "kv_load_failure_policy": "maybe"}


def run(config: Any, *arguments: str, stdin: str | None = None) -> Result:
    text = config if isinstance(config, str) else json.dumps(config)
    return CliRunner().invoke(cli.app, ["check", text, *arguments], input=stdin, env={"COLUMNS": "160"})


def test_a_good_configuration_shows_where_metrics_and_spans_go() -> None:
    spans = ("--otlp-traces-endpoint", "http://collector:4317")
    short, result = run(GOOD, *spans), run(GOOD, *spans, "-v")
    headline, where, end = short.stdout.splitlines()
    assert (short.exit_code, end) == (0, "no errors")
    assert "routes between vLLM" in headline
    to = "Metrics go to /metrics of vLLM's API server; spans go to http://collector:4317, from vLLM's API server."
    assert where == to
    assert result.stdout.startswith(short.stdout), "tables come last"
    lines = result.stdout.splitlines()
    cells = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines)
    texts = dict(cell for cell in cells if len(cell) == 2)
    assert texts["kv_connector"].split() == ["OffloadingConnector", "NixlConnector"]
    assert texts["metrics go to"] == "/metrics of vLLM's API server"
    assert texts["spans go to"] == "http://collector:4317, from vLLM's API server"
    report = json.loads(run(GOOD, *spans, "--json").stdout)
    assert (report["metrics_go_to"], report["spans_go_to"]) == (texts["metrics go to"], texts["spans go to"])


def test_each_mistake_is_a_line_with_its_fix() -> None:
    """Also in a pipe, which has no width."""
    result = CliRunner().invoke(cli.app, ["check", json.dumps(BAD)])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    policy, key = [line for line in lines if line.startswith("error: ")]
    assert policy.startswith("error: kv_load_failure_policy: found 'maybe', allowed: 'recompute' or 'fail'. Fix: ")
    assert key.startswith("error: kv_rol: unknown key, allowed: ")
    assert key.endswith("Fix: use 'kv_role'.")
    assert lines[-1] == "2 errors"
    noted = json.loads(run(BAD, "--json").stdout)
    assert [error["path"] for error in noted["errors"]] == ["kv_load_failure_policy", "kv_rol"]
    assert [connector["name"] for connector in noted["connectors"]] == ["OffloadingConnector", "NixlConnector"]
    assert noted["connectors"][0]["facts"]["supports_hma"] is True


def test_rewrite_prints_the_configuration_alone() -> None:
    result = run(STOCK, "--rewrite")
    assert (result.exit_code, json.loads(result.stdout), result.stderr.strip()) == (0, GOOD, "")
    assert run(result.stdout, "--rewrite").stdout == result.stdout
    without_library = run({"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}, "--rewrite")
    assert json.loads(without_library.stdout)["kv_connector_module_path"] == "kvobs"
    assert without_library.exit_code == 0, "the connectors' libraries may be missing here"
    for change in ({"kv_role": "both"}, {"kv_connector": None}, {"kv_connector_module_path": "kv_obs"}):
        result = run(STOCK | change, "--rewrite")
        assert (result.exit_code, result.stdout) == (1, "")
        assert any(line.startswith(f"error: {key}: ") for line in result.stderr.splitlines() for key in change)


@pytest.mark.parametrize("value", ["\0", "\ud800"])
def test_a_variable_that_no_process_can_have_is_left_out(value: str) -> None:
    command = ["vllm", "serve", "m", "--kv-transfer-config", json.dumps(GOOD)]
    result = run({"service": {"command": command, "env": {"KVOBS_EXPORTER": value}}})
    assert result.stdout.splitlines()[-1].startswith("no errors")


def test_stock_configuration_is_checked_as_it_would_be_in_kvobs() -> None:
    result = run("-", stdin=json.dumps(STOCK))
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "vLLM does not load kvobs with this configuration. With --rewrite kvobs would route between vLLM"
    )
    assert "warning: kv_connector_module_path: " in result.stdout
    assert result.stdout.splitlines()[-1] == "no errors, 1 warning"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("/no/such/file.json", "/no/such/file.json: No such file or directory"),
        ('{"kv_role": }', "not valid JSON: Expecting value: line 1"),
        ("[]", "is of type list, not an object"),
        ("/bin/true", "/bin/true: is no file with UTF-8 text"),
        ("/tmp", "/tmp: Is a directory"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--json",), ("--rewrite",)])
def test_text_that_can_not_be_read_is_a_mistake(config: str, says: str, option: tuple[str, ...]) -> None:
    result = run(config, *option)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output
    if option == ("--json",):
        assert json.loads(result.stdout)["errors"][0]["path"] == "CONFIG"


def test_the_options_of_vllm_are_read() -> None:
    pair = ("--disable-log-stats", "--otlp-traces-endpoint", "http://collector:4317")
    assert run(GOOD, *pair).exit_code == 1
    assert run(GOOD, *pair[:1]).exit_code == 0
    noted = json.loads(run(GOOD, *pair[1:], "--api-server-count", "2", "--json").stdout)
    assert noted["tracing"] == "requests"
    assert noted["metrics_go_to"].endswith(", from kvobs's exporter, which the engine starts: --api-server-count")


def test_each_engine_of_a_file_has_a_part_above_the_sum() -> None:
    line = f"vllm serve m --kv-transfer-config '{json.dumps(STOCK)}'"
    result = run(f"vllm serve m --kv-transfer-config $KV &\nKVOBS_ENABLE=1 {line}")
    lines = [line for line in result.stdout.splitlines() if line]
    assert (result.exit_code, lines[0], *lines[2:4]) == (0, "command 1", "no errors, 1 not known here", "command 2")
    assert lines[1].startswith("unknown: CONFIG: --kv-transfer-config has $KV, whose value is not known here. Fix: ")
    assert lines[4].endswith(", enabled by KVOBS_ENABLE.")
    assert lines[-2:] == ["no errors", "2 engines: no errors, 1 not known here"]


def test_line_of_the_readme_is_not_known_here() -> None:
    readme = (Path(__file__).parents[4] / "README.md").read_text()
    (line,) = re.findall(r"vllm serve MODEL --kv-transfer-config .*check --rewrite.*", readme)
    result = run(line)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no errors, 1 not known here")
    report = json.loads(run(line, "--json").stdout)
    (unknown,) = report["unknown"]
    assert "$(kvobs check --rewrite stock.json), whose value" in unknown["found"]
    assert (report["errors"], report["is_routed_by_kvobs"]) == ([], None)
    result = run(line, "--rewrite")
    assert (result.exit_code, result.stdout) == (1, ""), "there is nothing to start vLLM with"


WITHOUT_VLLM = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from kvobs.cli import app; app()"


def process(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def without_vllm(config: Any, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    text = json.dumps(config, ensure_ascii=False)
    return process(sys.executable, "-c", WITHOUT_VLLM, "check", text, *arguments, **environment)


def test_without_vllm_only_the_text_is_checked() -> None:
    result = without_vllm(GOOD)
    assert result.returncode == 0, result.stderr
    assert "vLLM (not installed here)" in " ".join(result.stdout.split())
    noted = json.loads(without_vllm(BAD, "--json").stdout)
    assert noted["vllm"] is None
    assert {error["path"] for error in noted["errors"]} == {"kv_load_failure_policy", "kv_rol"}
    assert [connector["facts"] for connector in noted["connectors"]] == [None, None]
    assert "vLLM is not installed here" in noted["off"]["classes"]
    result = without_vllm(STOCK, "--rewrite")
    assert (result.returncode, json.loads(result.stdout)) == (0, GOOD)


def test_no_character_is_too_much_for_an_ascii_terminal() -> None:
    result = without_vllm({"kv_connector": "Ünïcode", "kv_role": "ßoth"}, "-v", PYTHONIOENCODING="ascii")
    assert "Traceback" not in result.stderr
    assert result.returncode == 1
    assert "\\xdcn\\xefcode" in result.stdout


def test_the_output_of_vllm_and_of_libraries_is_discarded() -> None:
    """Where the command imports vLLM, and a connector whose library is missing."""
    mooncake = json.dumps({"kv_connector": "MooncakeConnector", **BOTH})
    result = process(str(Path(sys.executable).parent / "kvobs"), "check", mooncake, "--deep", "--json")
    assert json.loads(result.stdout)["connectors"][0]["kv_connector"] == "MooncakeConnector"
    assert result.stderr == ""


COMMAND = (sys.executable, "-c", "from kvobs.cli import app; app()", "check")


def with_vllm(code: str, folder: Path) -> dict[str, str]:
    """Return an environment with a vLLM that is this code."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "_version.py").write_text("__version__ = '0.32.0'")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def test_ctrl_c_ends_the_import_of_vllm(tmp_path: Path) -> None:
    """Without a traceback."""
    started = tmp_path / "started"
    environment = os.environ | with_vllm(f"import time; open({str(started)!r}, 'w'); time.sleep(600)", tmp_path)
    command, pipe = [*COMMAND, json.dumps(GOOD), "--deep"], subprocess.PIPE
    check = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert eventually(started.exists)
    check.send_signal(signal.SIGINT)
    assert check.wait(timeout=60) == 130
    assert "Traceback" not in check.communicate()[1]


NOISE = "import os; print('noise'); os.write(1, b'noise'); os.write(2, b'noise'); "


@pytest.mark.parametrize("is_stderr_closed", [True, False])
def test_a_vllm_that_can_not_be_imported_is_a_warning(tmp_path: Path, is_stderr_closed: bool) -> None:
    environment = with_vllm(f"{NOISE}raise OSError('libcuda.so.1 is missing')", tmp_path)
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if is_stderr_closed else []
    result = process(*closed, *COMMAND, json.dumps(GOOD), "--deep", **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "noise" not in result.stdout
    assert "warning: vLLM: can't be imported here" in result.stdout
    assert "OSError: libcuda.so.1 is missing" in result.stdout
    assert result.stdout.splitlines()[-1] == "no errors, 1 warning; the connectors' classes were not checked"


MEASURED = """
import os, resource, sys
before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
from kvobs.cli import app
try:
    app()
except SystemExit:
    pass
assert not {"torch", "vllm", "numpy"} & sys.modules.keys(), sys.modules.keys()
print(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before, file=sys.stderr)
"""


@pytest.mark.parametrize("connector", ["NixlConnector", "OffloadingConnector", "MoRIIOConnector"])
def test_a_check_takes_a_second_and_a_half_without_torch(connector: str, tmp_path: Path) -> None:
    """Of this process's own time: others may have the processors."""
    file = tmp_path / "kvobs.json"
    file.write_text(
        json.dumps({"kv_connector": connector, PATH: {"cpu_bytes_to_use": 1 << 30, "http_port": 1}, **BOTH})
    )
    result = process(sys.executable, "-c", MEASURED, "check", str(file))
    assert float(result.stderr) < 1.5
