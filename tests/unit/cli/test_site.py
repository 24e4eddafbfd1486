"""What an export becomes with a site's settings: what the generator would make for that site."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from typer.testing import CliRunner

from dashboards import alerts, site
from dashboards.kubernetes import LABEL
from kvobs.cli import app, dashboards
from kvobs.cli.site import Site, pairs
from tests.support.boards import matchers, queries, selectors

OURS = {
    "grafana": "https://grafana.example.org/g/",
    "runbook": "https://wiki.example.org/kvobs",
    "job": "llm/kvobs",
    "cluster": "k8s_cluster",
}
THRESHOLDS = {"failed_share": "0.2", "few_failed": "50", "slow_load_s": "4.294967296", "self_share": "1.5"}
WHOLE = Site(**OURS, labels=["release=mon", "team/a=b"], namespaces=["a", "b"], thresholds=THRESHOLDS)
DEFAULTS = dashboards.contents()
CHANGED = dashboards.contents(WHOLE)


def made_for(**texts: str) -> str:
    numbers = {name: float(value) if "." in value else int(value) for name, value in THRESHOLDS.items()}
    return alerts.rules_yaml(site.Site(**texts, **numbers))  # type: ignore[arg-type]


def test_rules_are_those_that_the_generator_makes_for_the_site() -> None:
    assert CHANGED["rules/kvobs.rules.yml"].decode() == made_for(**OURS | {"grafana": OURS["grafana"].rstrip("/")})
    assert DEFAULTS["rules/kvobs.rules.yml"].decode() == alerts.rules_yaml(site.Site(grafana=""))
    of_stack = dashboards.contents(Site(grafana="http://localhost:3000"))["rules/kvobs.rules.yml"]
    assert of_stack == (dashboards.CHECKOUT / "generated/rules/kvobs.rules.yml").read_bytes()


def test_manifests_are_those_of_the_checkout_unless_something_is_chosen() -> None:
    for name in ("podmonitor", "prometheusrule"):
        place = f"kubernetes/{name}.yaml"
        assert DEFAULTS[place] == (dashboards.CHECKOUT / "generated" / place).read_bytes()


def test_no_link_leads_to_this_machine_unless_asked() -> None:
    for path, content in (*DEFAULTS.items(), *CHANGED.items()):
        assert b"localhost" not in content, path
    assert b"http://localhost:3000/d/" in dashboards.contents(Site(grafana="http://localhost:3000"))[
        "rules/kvobs.rules.yml"
    ]  # fmt: skip


def test_nothing_of_a_template_is_left() -> None:
    tokens = [site.token(name) for name in (*OURS, *site.thresholds(), "labels", "namespaces")]
    for path, content in (*DEFAULTS.items(), *CHANGED.items()):
        assert not [token for token in tokens if token in content.decode()], path


def test_manifests_have_the_labels_namespaces_and_job() -> None:
    monitor, rule = (yaml.safe_load(CHANGED[f"kubernetes/{name}.yaml"]) for name in ("podmonitor", "prometheusrule"))
    for manifest in (monitor, rule):
        assert manifest["metadata"]["labels"] == LABEL | {"release": "mon", "team/a": "b"}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    jobs = [endpoint["relabelings"][0]["replacement"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    assert jobs == ["vllm", "llm/kvobs"]
    assert rule["spec"] == yaml.safe_load(CHANGED["rules/kvobs.rules.yml"])
    scraped = yaml.safe_load(CHANGED["stack/prometheus.yml"])["scrape_configs"]
    assert [job["job_name"] for job in scraped] == ["vllm", "llm/kvobs", "otel-collector"]
    assert b'up{job="llm/kvobs"}' in CHANGED["runbook.md"]


@pytest.mark.parametrize("path", [path for path in DEFAULTS if path.startswith("boards/")])
def test_boards_ask_by_the_label_of_the_cluster_and_link_the_runbook(path: str) -> None:
    board: dict[str, Any] = json.loads(CHANGED[path])
    for where, expr in queries(board):
        for selector, _ in selectors(expr):
            assert matchers(selector).get("k8s_cluster") in {"=~$cluster", "=~$cluster|"}, where
            assert "cluster" not in matchers(selector)
        groups = [set(group.split(", ")) for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr)]
        assert not [group for group in groups if "cluster" in group], where
        promql_parser.parse(expr.replace("$__rate_interval", "5m"))
    (variable,) = [v for v in board["templating"]["list"] if v["name"] == "cluster"]
    assert variable["query"]["query"] == "label_values(kvobs_connector_info{}, k8s_cluster)"
    for panel in board["panels"]:
        for step in panel.get("transformations", ()):
            assert "cluster" not in step["options"].get("renameByName", {})
    assert OURS["runbook"] in [link.get("url") for link in board["links"]]
    assert site.RUNBOOK not in CHANGED[path].decode()
    back = CHANGED[path].decode().replace("k8s_cluster", "cluster").replace(OURS["runbook"], site.RUNBOOK)
    assert back == DEFAULTS[path].decode(), "nothing else changes"


def test_alertmanager_and_the_runbook_know_the_label_of_the_cluster() -> None:
    """With a label that alerts do not have, an alert of one cluster would silence those of the others."""
    routing = yaml.safe_load(CHANGED["stack/alertmanager.yml"])
    assert "k8s_cluster" in routing["route"]["group_by"]
    assert "cluster" not in routing["route"]["group_by"]
    for rule in routing["inhibit_rules"]:
        assert "k8s_cluster" in rule["equal"]
        assert "cluster" not in rule["equal"]
    asked = re.findall(r"^    (\S.*)$", CHANGED["runbook.md"].decode(), re.MULTILINE)
    assert [query for query in asked if "k8s_cluster" in query]
    assert not [query for query in asked if re.search(r"\bcluster\b", query)]
    for path in ("stack/alertmanager.yml", "runbook.md"):
        back = CHANGED[path].decode().replace("k8s_cluster", "cluster").replace("llm/kvobs", "kvobs")
        assert back == DEFAULTS[path].decode(), "nothing else changes"


def test_exported_settings_of_prometheus_load_the_exported_rules(tmp_path: Path) -> None:
    dashboards.export(tmp_path, CHANGED)
    tool = shutil.which("promtool")
    assert tool, "promtool is missing: run `make promtool`"
    command = [tool, "check", "config", "prometheus.yml"]
    said = subprocess.run(command, cwd=tmp_path / "stack", capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert re.search(r"SUCCESS: \d\d rules found", said.stdout)


def test_the_command_takes_all_of_it(tmp_path: Path) -> None:
    options = [part for name, value in OURS.items() for part in (f"--{name}", value)]
    options += ["--label", "release=mon", "--label", "team/a=b", "--namespace", "a", "--namespace", "b"]
    options += [part for name, value in THRESHOLDS.items() for part in ("--threshold", f"{name}={value}")]
    result = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert {path: (tmp_path / path).read_bytes() for path in CHANGED} == CHANGED


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--grafana", "grafana.example.org"], "allowed is an address such as https://grafana.example.org"),
        (["--runbook", "wiki"], "--runbook 'wiki'"),
        (["--job", 'a"b'], "allowed is letters, digits"),
        (["--cluster", "a-b"], "allowed is the name of a label"),
        (["--label", "release"], "allowed is NAME=VALUE as Kubernetes takes it"),
        (["--namespace", "A_b"], "allowed is the name of a namespace"),
        (["--threshold", "few_failed"], "--threshold 'few_failed': allowed is NAME=VALUE"),
        (["--threshold", "few_failde=3"], "there is no such threshold; use one of: failed_share, few_failed"),
        (["--threshold", "few_failed=-3"], "allowed is a number (failed loads in 15 minutes"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(options: list[str], says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path / "new"), *options])
    assert result.exit_code == 1
    assert says in result.output
    assert not (tmp_path / "new").exists()


def test_a_threshold_may_have_any_text_after_the_first_sign() -> None:
    assert pairs(["a=1", "b=2=3"]) == {"a": "1", "b": "2=3"}
