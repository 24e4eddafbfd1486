"""Put a site's settings into the boards, rules and manifests of an export.

Rules and manifests are templates with tokens such as ``__job__``; boards and Prometheus's settings are changed where
they have the default.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LABEL_NAME = re.compile(r"[A-Za-z_]\w*")
_KUBERNETES_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?=([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_JOB = re.compile(r"[\w./-]+")
_URL = re.compile(r"https?://[^\s\"'{}]+")


@dataclass(frozen=True)
class Site:
    """The settings of a site; empty ones stay as they are by default.

    Without ``grafana`` alerts have no link to a board.
    """

    grafana: str = ""
    runbook: str = ""
    job: str = ""
    cluster: str = ""
    labels: Sequence[str] = ()
    namespaces: Sequence[str] = ()
    thresholds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for what Prometheus, Kubernetes or a browser would not take."""
        checks = [
            ("--grafana", _URL, [self.grafana], "an address such as https://grafana.example.org"),
            ("--runbook", _URL, [self.runbook], "an address such as https://wiki.example.org/kvobs"),
            ("--job", _JOB, [self.job], "letters, digits and _ . / -"),
            ("--cluster", _LABEL_NAME, [self.cluster], "the name of a label, such as cluster"),
            (
                "--label",
                _KUBERNETES_LABEL,
                self.labels,
                "NAME=VALUE as Kubernetes takes it, such as release=monitoring",
            ),
            ("--namespace", _NAMESPACE, self.namespaces, "the name of a namespace"),
        ]
        for option, pattern, values, allowed in checks:
            for value in values:
                if value and not pattern.fullmatch(value):
                    raise ValueError(f"{option} {value!r}: allowed is {allowed}")


def pairs(values: Sequence[str]) -> dict[str, str]:
    """Return thresholds given as NAME=VALUE; ValueError for anything else."""
    found = {}
    for value in values:
        name, is_pair, number = value.partition("=")
        if not is_pair:
            raise ValueError(f"--threshold {value!r}: allowed is NAME=VALUE")
        found[name] = number
    return found


def fill(path: str, content: bytes, site: Site, defaults: Mapping[str, Any]) -> bytes:
    """Return a file's content for a site; ValueError for a threshold that there is not."""
    if path.startswith(("rules/", "kubernetes/")):
        return _template(content.decode(), site, defaults).encode()
    if path.startswith("boards/"):
        return _board(content.decode(), site, defaults).encode()
    job, cluster = site.job or defaults["job"], site.cluster or defaults["cluster"]
    if path == "stack/prometheus.yml":
        return content.replace(f"job_name: {defaults['job']}\n".encode(), f"job_name: {job}\n".encode())
    if path == "stack/alertmanager.yml":
        return _in_lists(content.decode(), defaults["cluster"], cluster).encode()
    if path == "runbook.md":
        text = content.decode().replace(f'job="{defaults["job"]}"', f'job="{job}"')
        # Its queries are indented.
        return re.sub(
            "^    .*$", lambda line: _in_lists(line[0], defaults["cluster"], cluster), text, flags=re.MULTILINE
        ).encode()
    return content


def _in_lists(text: str, name: str, new: str) -> str:
    """Replace a name where it is an item of a list in brackets."""
    return re.sub(rf"(?<=[\[(, ]){name}(?=[\],)])", new, text)


def _template(text: str, site: Site, defaults: Mapping[str, Any]) -> str:
    values = {name: getattr(site, name) or defaults[name] for name in ("job", "cluster", "runbook")}
    values |= {"grafana": site.grafana.rstrip("/")} | _thresholds(site.thresholds, defaults["thresholds"])
    labels = [f"{name}: {json.dumps(value)}" for name, _, value in (label.partition("=") for label in site.labels)]
    namespaces = ["namespaceSelector:", f"  matchNames: {json.dumps(list(site.namespaces))}"] if site.namespaces else []
    text = _lines(_lines(text, "labels", labels), "namespaces", namespaces)
    if not site.grafana:
        text = re.sub(r"^ *dashboard_url: .*\n", "", text, flags=re.MULTILINE)
    for name, value in values.items():
        text = text.replace(f"__{name}__", value)
    return text


def _lines(text: str, name: str, lines: Sequence[str]) -> str:
    """Put lines, indented alike, in the place of one that has a token as its key."""
    found = re.compile(rf"^( *)__{name}__: ''\n", re.MULTILINE)
    return found.sub(lambda match: "".join(f"{match[1]}{line}\n" for line in lines), text)


def _thresholds(chosen: Mapping[str, str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    for name, value in chosen.items():
        if name not in known:
            raise ValueError(f"--threshold {name}: there is no such threshold; use one of: {', '.join(known)}")
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ValueError(f"--threshold {name}={value}: allowed is a number ({known[name]['meaning']})")
    return {name: str(each["value"]) for name, each in known.items()} | dict(chosen)


def _board(text: str, site: Site, defaults: Mapping[str, Any]) -> str:
    text = text.replace(defaults["runbook"], site.runbook or defaults["runbook"])
    label = site.cluster or defaults["cluster"]
    # Matchers, lists of labels, and columns; the variable keeps its name.
    for place in (r"(?<=[{{,]){}(?==~)", r"(?<=[( ]){}(?=[,)])", r'(?<="){}(?=": (?:"|\d))'):
        text = re.sub(place.format(defaults["cluster"]), label, text)
    return text
