"""What `kvobs dashboards export` writes, from a checkout and from a wheel, with a site's settings or without."""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dashboards import alerts, site
from dashboards.kubernetes import LABEL
from kvobs.cli import app, dashboards
from kvobs.cli.dashboards import SiteSettings
from tests.support.boards import matchers, queries, selectors
from tests.support.promtool import passed

ROOT = Path(__file__).parents[3]
FILES = {"boards/a.json": b"{}", "runbook.md": b"# Runbook\n", "stack/grafana/x.yaml": b""}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkout_has_all_that_is_made() -> None:
    files = dashboards.read_sources()
    for place, source in dashboards.PLACES.items():
        path = ROOT / "dashboards" / source
        whole = {"": path.read_bytes()} if path.is_file() else {f"/{name}": text for name, text in tree(path).items()}
        assert {name.removeprefix(place): files[name] for name in files if f"{name}/".startswith(f"{place}/")} == whole
    assert len([name for name in files if name.startswith("boards/")]) == 5


def test_a_wheel_exports_what_a_checkout_does_byte_by_byte(tmp_path: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    command = [str(uv), "build", "--quiet", "--wheel", "--out-dir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert (tmp_path / "site/kvobs/testing/rig.py").is_file(), "for connectors' own tests"
    code = "import sys; sys.path.insert(0, 'site'); import kvobs; assert 'site' in kvobs.__file__; "
    command = [sys.executable, "-c", f"{code}from kvobs.cli import app; app()", "dashboards", "export", "out"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    files = dashboards.contents()
    assert tree(tmp_path / "out") == files
    assert f"{len(files)} files written, 0 unchanged" in said.stdout


def test_an_incomplete_installation_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exported/boards").mkdir(parents=True)
    monkeypatch.setattr(dashboards, "SHIPPED", tmp_path / "exported")
    names = ("rules", "kubernetes", "kustomization.yaml", "stack", "runbook.md", "settings.json")
    missing = ", ".join(rf"\S*{name}" for name in names)
    with pytest.raises(ValueError, match=f"is incomplete: {missing} is missing"):
        dashboards.contents()


def test_files_that_differ_are_overwritten_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "boards").mkdir()
    (tmp_path / "boards/a.json").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"boards/a.json; --force"):
        dashboards.export(tmp_path, FILES)
    assert tree(tmp_path) == {"boards/a.json": b"mine"}
    with pytest.raises(ValueError, match="is a file"):
        dashboards.export(tmp_path / "boards/a.json", FILES)
    assert dashboards.export(tmp_path, FILES, force=True) == list(FILES)
    assert tree(tmp_path) == FILES


@given(st.sets(st.sampled_from(sorted(FILES))))
def test_only_what_is_missing_is_written(present: set[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dashboards.export(folder, {path: FILES[path] for path in present})
        assert set(dashboards.export(folder, FILES)) == FILES.keys() - present
        assert tree(folder) == FILES


def kvobs(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["dashboards", "export", *arguments])
    return result.exit_code, result.output


def test_the_command_says_what_it_wrote_and_what_was_there(tmp_path: Path) -> None:
    code, output = kvobs(str(tmp_path / "new"))
    assert code == 0
    assert [line for line in output.splitlines() if line.endswith("runbook.md")] == [str(tmp_path / "new/runbook.md")]
    (tmp_path / "new/boards/kvobs-overview.json").unlink()
    assert kvobs(str(tmp_path / "new"))[1].splitlines()[1].startswith("1 file written, ")
    (tmp_path / "new/runbook.md").write_text("mine")
    code, output = kvobs(str(tmp_path / "new"))
    assert code == 1
    assert "different files with these names: runbook.md" in output
    assert kvobs("/proc/kvobs")[0] == 1


def test_an_empty_folder_is_not_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may have a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    code, output = kvobs("")
    assert code == 2
    assert "it is empty; give a folder" in output
    assert tree(tmp_path) == {}
    assert kvobs(".")[0] == 0


OURS = {
    "grafana": "https://grafana.example.org/g/", "runbook": "https://wiki.example.org/kvobs", "job": "llm/kvobs",
    "cluster": "k8s_cluster",
}  # fmt: skip
THRESHOLDS = {"failed_share": "0.2", "few_failed": "50", "slow_load_s": "4", "self_share": "0.5"}
CHOSEN = [f"{name}={value}" for name, value in THRESHOLDS.items()]
WHOLE = SiteSettings(**OURS, labels=["release=mon", "team/a=b"], namespaces=["a", "b"], thresholds=CHOSEN)
DEFAULTS = dashboards.contents()
CHANGED = dashboards.contents(WHOLE)


def test_rules_are_those_that_the_generator_makes_for_the_site() -> None:
    texts: Any = OURS | {"grafana": OURS["grafana"].rstrip("/")}
    numbers = {name: float(value) if "." in value else int(value) for name, value in THRESHOLDS.items()}
    assert CHANGED["rules/kvobs.rules.yml"].decode() == alerts.rules_yaml(site.Site(**texts | numbers))
    assert DEFAULTS["rules/kvobs.rules.yml"].decode() == alerts.rules_yaml(site.Site(grafana=""))
    of_stack = dashboards.contents(SiteSettings(grafana="http://localhost:3000"))["rules/kvobs.rules.yml"]
    for place in ("kubernetes/podmonitor.yaml", "kubernetes/prometheusrule.yaml"):
        assert DEFAULTS[place] == (dashboards.CHECKOUT / "generated" / place).read_bytes(), "as nothing is chosen"
    assert of_stack == (dashboards.CHECKOUT / "generated/rules/kvobs.rules.yml").read_bytes()


def test_nothing_of_a_template_and_no_local_link_is_left() -> None:
    tokens = [site.token(name) for name in (*OURS, *site.thresholds(), "labels", "namespaces")]
    for path, content in (*DEFAULTS.items(), *CHANGED.items()):
        assert not [token for token in (*tokens, "localhost") if token in content.decode()], path


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
def test_boards_select_by_cluster_and_link_the_runbook(path: str) -> None:
    board: dict[str, Any] = json.loads(CHANGED[path])
    for where, expr in queries(board):
        for selector, _ in selectors(expr):
            assert matchers(selector).get("k8s_cluster") in {"=~$cluster", "=~$cluster|"}, where
        assert not re.search(r"(?<!\$)\bcluster\b", expr), where
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


def test_links_of_an_exported_runbook_lead_out_of_the_export() -> None:
    links = re.findall(r"\]\(([^)]+)\)", CHANGED["runbook.md"].decode())
    assert f"{site.RUNBOOK.partition('/dashboards/')[0]}/docs/alerts.md" in links
    assert [link for link in links if not link.startswith("https://")] == []


def test_alertmanager_and_runbook_know_the_label_of_the_cluster() -> None:
    """With a label that alerts do not have, an alert of one cluster would silence those of the others."""
    routing = yaml.safe_load(CHANGED["stack/alertmanager.yml"])
    for labels in (routing["route"]["group_by"], *(rule["equal"] for rule in routing["inhibit_rules"])):
        assert {"k8s_cluster", "cluster"} & set(labels) == {"k8s_cluster"}
    asked = " ".join(re.findall(r"^    (\S.*)$", CHANGED["runbook.md"].decode(), re.MULTILINE))
    assert set(re.findall(r"\b(?:k8s_)?cluster\b", asked)) == {"k8s_cluster"}
    for path in ("stack/alertmanager.yml", "runbook.md"):
        back = CHANGED[path].decode().replace("k8s_cluster", "cluster").replace("llm/kvobs", "kvobs")
        back, of_site = re.subn(r"\n\nThe thresholds of this site differ .*:\n(\n- `\w+`: .*)+", "", back)
        assert back == DEFAULTS[path].decode(), "nothing else changes"
        assert of_site == (path == "runbook.md")
    assert dict(re.findall(r"^- `(\w+)`: ([\d.]+), \w", CHANGED["runbook.md"].decode(), re.MULTILINE)) == THRESHOLDS


@pytest.mark.tools
def test_exported_settings_of_prometheus_load_the_exported_rules(tmp_path: Path) -> None:
    dashboards.export(tmp_path, CHANGED)
    assert re.search(r"SUCCESS: \d\d rules found", passed("check", "config", "prometheus.yml", cwd=tmp_path / "stack"))


def test_the_command_takes_all_of_it(tmp_path: Path) -> None:
    options = [part for name, value in OURS.items() for part in (f"--{name}", value)]
    options += ["--label", "release=mon", "--label", "team/a=b", "--namespace", "a", "--namespace", "b"]
    options += [part for threshold in CHOSEN for part in ("--threshold", threshold)]
    code, output = kvobs(str(tmp_path), *options)
    assert code == 0, output
    assert {path: (tmp_path / path).read_bytes() for path in CHANGED} == CHANGED


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--grafana", "grafana.example.org", "is not valid; use an address such as https://grafana.example.org"),
        ("--runbook", "wiki", "--runbook 'wiki'"),
        ("--runbook", "https://wiki.example.org/a\\b", "is not valid"),
        ("--job", 'a"b', "use letters, digits"),
        ("--cluster", "a-b", "use the name of a label"),
        ("--cluster", "régio", "use the name of a label"),
        ("--label", "release", "use NAME=VALUE for Kubernetes"),
        ("--label", "team=é", "use NAME=VALUE for Kubernetes"),
        ("--namespace", "A_b", "use the name of a namespace"),
        ("--threshold", "few_failed", "--threshold few_failed is not valid; use few_failed=a whole number of"),
        ("--threshold", "few_failde=3", "is unknown; use one of: failed_share, few_failed"),
        ("--threshold", "few_failed=2.5", "use few_failed=a whole number of at least 1 (failed loads in"),
        ("--threshold", "load_age_s=0", "use load_age_s=a whole number of at least 1"),
        ("--threshold", "slowed_times=1", "use slowed_times=a whole number of at least 2"),
        (
            "--threshold",
            "slow_load_s=3",
            "use slow_load_s=a bucket bound, such as 2.828427125 or 3.363585661 (",
        ),
        ("--threshold", "slow_load_s=64", "such as 45.254833996 or 53.817370576 (p99 of load durations"),
        ("--threshold", "failed_share=1", "failed_share=a number above 0 and below 1 (share of loads that failed"),
        ("--threshold", "rank_lead=0", "use rank_lead=a number above 0 and below 1"),
        ("--threshold", "rank_skew_s=-1", "use rank_skew_s=NUMBER"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_written(option: str, value: str, says: str, tmp_path: Path) -> None:
    code, output = kvobs(str(tmp_path / "new"), option, value)
    assert code == 1
    assert says in output
    assert not (tmp_path / "new").exists()
