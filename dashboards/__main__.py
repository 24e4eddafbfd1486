"""Generate the files under ``dashboards/generated``, or with ``--check`` list those that differ."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dashboards import frame, kubernetes
from dashboards.alerts import rules_yaml
from dashboards.connector import connector
from dashboards.frame import Board
from dashboards.itself import itself
from dashboards.overview import overview
from dashboards.prefill_decode import prefill_decode
from dashboards.site import Site, settings
from dashboards.slow_loads import slow_loads

GENERATED = Path(__file__).parent / "generated"


def _text(build: Callable[[], Board]) -> str:
    return frame.classic(build())


BOARDS: dict[str, Callable[[], Board]] = {
    frame.OVERVIEW: overview,
    frame.CONNECTOR: connector,
    frame.SLOW_LOADS: slow_loads,
    frame.PREFILL_DECODE: prefill_decode,
    frame.ITSELF: itself,
}
FILES: dict[str, Callable[[], str]] = {
    **{f"boards/{uid}.json": partial(_text, build) for uid, build in BOARDS.items()},
    "rules/kvobs.rules.yml": lambda: rules_yaml(Site()),
    "kubernetes/podmonitor.yaml": lambda: kubernetes.pod_monitor(Site()),
    # Where Grafana is in a cluster only its owner knows.
    "kubernetes/prometheusrule.yaml": lambda: kubernetes.prometheus_rule(Site(grafana="")),
    "templates/rules/kvobs.rules.yml": rules_yaml,
    "templates/kubernetes/podmonitor.yaml": kubernetes.pod_monitor,
    "templates/kubernetes/prometheusrule.yaml": kubernetes.prometheus_rule,
    "templates/settings.json": lambda: json.dumps(settings(), indent=2) + "\n",
    "kustomization.yaml": lambda: kubernetes.kustomization(BOARDS),
}


def main() -> None:
    """Write or check all files."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where a file differs")
    is_check = parser.parse_args().check
    differing = differences(GENERATED)
    for path in differing:
        if not is_check:
            (GENERATED / path).parent.mkdir(parents=True, exist_ok=True)
            (GENERATED / path).write_text(FILES[path](), encoding="utf-8")
        print(f"{path}: {'differs from what python -m dashboards makes' if is_check else 'written'}")  # noqa: T201
    sys.exit(1 if is_check and differing else 0)


def differences(folder: Path) -> list[str]:
    """Return the files of the table that this folder does not have, or has otherwise."""
    return [
        path
        for path, text in FILES.items()
        if not (folder / path).is_file() or (folder / path).read_text(encoding="utf-8") != text()
    ]


if __name__ == "__main__":
    main()
