"""The examples of docs/admission.md run: the step of a pipeline, the hook before a commit, the webhook's command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.pages import FOLDER
from kvobs.schema.kinds import CPU, NIXL, NO_ADDRESS, pod

PAGE = (FOLDER / "admission.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
STEPS, HOOKS, COMMAND = (text for _, text in BLOCKS)
GOOD, BAD = pod(CPU), pod(CPU.replace("1073741824", '"8GB"'))


BASH, SH = ("bash", "-eo", "pipefail", "-c"), ("sh", "-c")


def run(command: str, folder: Path, given: str = "", shell: tuple[str, ...] = BASH) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    arguments: Any = {"cwd": folder, "input": given, "env": env, "timeout": 300}
    return subprocess.run([*shell, command], capture_output=True, text=True, check=False, **arguments)


@pytest.mark.tools
@pytest.mark.parametrize(("text", "status"), [(GOOD, 0), (BAD, 1), (pod(NIXL), 0)])
def test_the_step_stops_at_a_mistake_and_shows_warnings(text: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/decode.yaml").write_text(text)
    _, check, show = (str(step["run"]) for step in yaml.safe_load(STEPS)["steps"])
    assert run(check, tmp_path).returncode == status
    shown = run(show, tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("::warning::kv_connector: kvobs is not enabled. Fix: ")
    assert ("SIDE_CHANNEL_HOST: is not set" in shown.stdout) is (text == pod(NIXL))
    (strict,) = re.findall(r"`(jq --exit-status .*?)`", PAGE)
    assert run(strict, tmp_path).returncode == 1


def test_the_hook_checks_each_file_that_has_changed(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load(HOOKS)["repos"][0]["hooks"]
    assert re.search(hook["files"], "deploy/a/decode.yaml")
    for name, text in (("good", GOOD), ("bad", BAD), ("also", NO_ADDRESS.right)):
        (tmp_path / name).write_text(text)
    both = run(f"{hook['entry']} good bad also", tmp_path)
    assert (both.returncode, both.stdout.count("error: ")) == (1, 1)
    assert run(f"{hook['entry']} good also", tmp_path).returncode == 0


@pytest.mark.tools
@pytest.mark.parametrize(("text", "is_allowed", "message"), [
    (GOOD, True, ""), (BAD, False, "cpu_bytes_to_use: found a value of type str"),
    ("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: b}\n", True, ""),
])  # fmt: skip
def test_the_webhook_admits_what_has_no_mistake(text: str, is_allowed: bool, message: str, tmp_path: Path) -> None:
    review: dict[str, Any] = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
    review["request"] = {"uid": "7", "object": yaml.safe_load(text)}
    answer = run(COMMAND, tmp_path, json.dumps(review), SH)
    response = json.loads(answer.stdout)["response"]
    assert (response["uid"], response["allowed"]) == ("7", is_allowed), answer
    assert message in response["status"]["message"]
    assert json.loads(answer.stdout)["kind"] == "AdmissionReview"
