"""The command ``kvobs dashboards export``: boards, rules, manifests and settings, with the settings of a site.

An installed package contains them; a checkout has them where they are generated. Rules and manifests are templates
with tokens such as ``__job__``; boards and Prometheus's settings are changed where they have the default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvobs.cli.output import count, examples, fail
from kvobs.schema import signals

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "exported"
CHECKOUT = PACKAGE.parent / "dashboards"
SETTINGS = "settings.json"
PLACES = {"boards": "generated/boards", "rules": "generated/templates/rules",
          "kubernetes": "generated/templates/kubernetes", "kustomization.yaml": "generated/kustomization.yaml",
          "stack": "stack", "runbook.md": "runbook.md",
          SETTINGS: f"generated/templates/{SETTINGS}"}  # fmt: skip
"""Place in an export -> place in a checkout's ``dashboards``; pyproject.toml has the same pairs."""


@app.callback()
def main() -> None:
    """Export dashboards, alerts and runbook."""


def _folder(text: str) -> Path:
    if not text:  # of a variable that is not set: it would be this folder
        raise typer.BadParameter("it is empty; give a folder, such as ./kvobs-dashboards, or . for this one")
    return Path(text)


@app.command("export", epilog=examples("kvobs dashboards export ./kvobs-dashboards"))
def export_dashboards(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=_folder, help="Folder to write to; created if missing.")
    ],
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files that differ.")] = False,
    grafana: Annotated[str, typer.Option(metavar="URL", help="Grafana's address, for links in alerts.")] = "",
    runbook: Annotated[str, typer.Option(metavar="URL", help="Address of your copy of the runbook.")] = "",
    job: Annotated[str, typer.Option(metavar="JOB", help="Scrape job of kvobs's metrics, instead of kvobs.")] = "",
    cluster: Annotated[
        str, typer.Option(metavar="LABEL", help="Label that distinguishes clusters, if it is not `cluster`.")
    ] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label of PodMonitor and PrometheusRule; repeatable.")
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Namespace of vLLM's pods; repeatable.")
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Threshold of alerts; repeatable.")
    ] = None,
) -> None:
    """Write Grafana boards, Prometheus rules, Kubernetes manifests, stack settings and the runbook to a folder."""
    try:
        lists = [values or () for values in (label, namespace, threshold)]
        settings = SiteSettings(grafana, runbook, job, cluster, *lists)
        files = contents(settings)
        written = export(folder, files, force=force)
    except ValueError as error:
        raise fail(str(error)) from None
    except OSError as error:
        raise fail(f"{error.filename or folder} can't be written: {error.strerror}") from None
    for path in written:
        typer.echo(folder / path)
    typer.echo(f"{count(len(written), 'file')} written, {len(files) - len(written)} unchanged")


def contents(settings: SiteSettings | None = None) -> dict[str, bytes]:
    """Return all files of an export by their place; ValueError if some are missing, or for a wrong setting."""
    files = read_sources()
    defaults = json.loads(files.pop(SETTINGS))
    return {path: _fill(path, content, settings or SiteSettings(), defaults) for path, content in files.items()}


def read_sources() -> dict[str, bytes]:
    """Return all files by their place, as they come with kvobs; ValueError if some are missing."""
    is_installed = SHIPPED.is_dir()
    roots = {place: SHIPPED / place if is_installed else CHECKOUT / source for place, source in PLACES.items()}
    if missing := [str(root) for root in roots.values() if not root.exists()]:
        raise ValueError(f"this installation of kvobs is incomplete: {', '.join(missing)} is missing; reinstall kvobs")
    return {
        str(Path(place) / path.relative_to(root)): path.read_bytes()
        for place, root in roots.items()
        for path in sorted([root] if root.is_file() else filter(Path.is_file, root.rglob("*")))
    }


def export(folder: Path, files: Mapping[str, bytes], *, force: bool = False) -> list[str]:
    """Write files that are missing or different; ValueError, before it writes, if one differs without ``force``."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder")
    paths = {place: folder / place for place in files}
    differing = [place for place, path in paths.items() if not path.is_file() or path.read_bytes() != files[place]]
    existing = [place for place in differing if paths[place].exists()]
    if existing and not force:
        names = ", ".join(existing)
        raise ValueError(
            f"{folder} already contains different files with these names: {names}; --force overwrites them"
        )
    for place in differing:
        paths[place].parent.mkdir(parents=True, exist_ok=True)
        paths[place].write_bytes(files[place])
    return differing


_BOUNDS = signals.LOAD_DURATION.buckets[:-1]
"""Where a quantile of loads is exact; it never exceeds the last bound."""
_CHANGED = "\n\nThe thresholds of this site differ from the ones in the sections:\n\n"
_FIRST_SECTION = "\n\n## "
_LABEL_NAME = r"(?a)[A-Za-z_]\w*"
_KUBERNETES_LABEL = r"(?a)([a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?=([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?"
_NAMESPACE = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_URL = r"https?://[^\s\"'{}\\]+"


@dataclass(frozen=True)
class SiteSettings:
    """The settings of a site; empty ones keep the default. Without ``grafana`` alerts have no link to a board.

    ValueError if Prometheus, Kubernetes or a browser would not take one of them.
    """

    grafana: str = ""
    runbook: str = ""
    job: str = ""
    cluster: str = ""
    labels: Sequence[str] = ()
    namespaces: Sequence[str] = ()
    thresholds: Sequence[str] = ()

    def __post_init__(self) -> None:
        _require("--grafana", _URL, [self.grafana], "an address such as https://grafana.example.org")
        _require("--runbook", _URL, [self.runbook], "an address such as https://wiki.example.org/kvobs")
        _require("--job", r"[\w./-]+", [self.job], "letters, digits and _ . / -")
        _require("--cluster", _LABEL_NAME, [self.cluster], "the name of a label, such as cluster")
        _require("--label", _KUBERNETES_LABEL, self.labels, "NAME=VALUE for Kubernetes, such as release=monitoring")
        _require("--namespace", _NAMESPACE, self.namespaces, "the name of a namespace")


def _require(option: str, pattern: str, values: Sequence[str], allowed: str) -> None:
    for value in values:
        if value and not re.fullmatch(pattern, value):
            raise ValueError(f"{option} {value!r} is not valid; use {allowed}")


def _fill(path: str, content: bytes, settings: SiteSettings, defaults: Mapping[str, Any]) -> bytes:
    """Return a file's content for a site; ValueError for an unknown threshold."""
    text = content.decode()
    old_job, old_cluster = defaults["job"], defaults["cluster"]
    job, cluster = settings.job or old_job, settings.cluster or old_cluster
    if path.startswith(("rules/", "kubernetes/")):
        text = _fill_template(text, settings, defaults)
    elif path.startswith("boards/"):
        text = text.replace(defaults["runbook"], settings.runbook or defaults["runbook"])
        # Matchers, lists of labels, and columns; the variable keeps its name.
        for place in (r"(?<=[{{,]){}(?==~)", r"(?<=[( ]){}(?=[,)])", r'(?<="){}(?=": (?:"|\d))'):
            text = re.sub(place.format(old_cluster), cluster, text)
    elif path == "stack/prometheus.yml":
        text = text.replace(f"job_name: {old_job}\n", f"job_name: {job}\n")
    elif path == "stack/alertmanager.yml":
        text = _replace_in_lists(text, old_cluster, cluster)
    elif path == "runbook.md":
        pages = defaults["runbook"].removesuffix("dashboards/runbook.md") + "docs/"  # which an export lacks
        text = text.replace("](../docs/", f"]({pages}")
        text = text.replace(f'job="{old_job}"', f'job="{job}"')
        known = defaults["thresholds"]
        changed = _choose_thresholds(settings.thresholds, known).items() - _choose_thresholds((), known).items()
        lines = [f"- `{name}`: {value}, {known[name]['meaning']}" for name, value in sorted(changed)]
        if lines:
            text = text.replace(_FIRST_SECTION, _CHANGED + "\n".join(lines) + _FIRST_SECTION, 1)
        # Its queries are indented.
        text = re.sub(
            "^    .*$", lambda line: _replace_in_lists(line[0], old_cluster, cluster), text, flags=re.MULTILINE
        )
    return text.encode()


def _replace_in_lists(text: str, name: str, new: str) -> str:
    """Replace a name where it is an item of a list in brackets."""
    return re.sub(rf"(?<=[\[(, ]){name}(?=[\],)])", new, text)


def _fill_template(text: str, settings: SiteSettings, defaults: Mapping[str, Any]) -> str:
    values = {name: getattr(settings, name) or defaults[name] for name in ("job", "cluster", "runbook")}
    values |= {"grafana": settings.grafana.rstrip("/")} | _choose_thresholds(
        settings.thresholds, defaults["thresholds"]
    )
    labels = (label.partition("=") for label in settings.labels)
    text = _insert_lines(text, "labels", [f"{name}: {json.dumps(value)}" for name, _, value in labels])
    names = ["namespaceSelector:", f"  matchNames: {json.dumps(list(settings.namespaces))}"]
    text = _insert_lines(text, "namespaces", names if settings.namespaces else [])
    if not settings.grafana:
        text = re.sub(r"^ *dashboard_url: .*\n", "", text, flags=re.MULTILINE)
    for name, value in values.items():
        text = text.replace(f"__{name}__", value)
    return text


def _insert_lines(text: str, name: str, lines: Sequence[str]) -> str:
    """Replace a line that has a token as its key by lines with the same indentation."""
    pattern = re.compile(rf"^( *)__{name}__: ''\n", re.MULTILINE)
    return pattern.sub(lambda match: "".join(f"{match[1]}{line}\n" for line in lines), text)


def _choose_thresholds(chosen: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return all thresholds; ValueError for one with which an alert would never fire, or always."""
    values = {name: str(threshold["value"]) for name, threshold in known.items()}
    for text in chosen:
        name, _, value = text.partition("=")
        if name not in known:
            raise ValueError(f"--threshold {name} is unknown; use one of: {', '.join(known)}")
        meaning, is_whole = known[name]["meaning"], isinstance(known[name]["value"], int)
        number = float(value) if re.fullmatch(r"[0-9]+" if is_whole else r"[0-9]*\.?[0-9]+", value) else -1
        is_right, allowed = number >= 0, "NUMBER"
        if name == "slow_load_s":
            nearest = sorted(sorted(_BOUNDS, key=lambda bound: abs(bound - number))[:2])
            is_right, allowed = number in _BOUNDS, f"a bucket bound, such as {nearest[0]} or {nearest[1]}"
        elif "share" in meaning:
            is_right, allowed = 0 < number < 1, "a number above 0 and below 1"
        elif is_whole:
            least = 2 if name == "slowed_times" else 1
            is_right, allowed = number >= least, f"a whole number of at least {least}"
        if not is_right:
            raise ValueError(f"--threshold {text} is not valid; use {name}={allowed} ({meaning})")
        values[name] = value
    return values
