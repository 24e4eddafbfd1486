"""Promtool, and what PromQL answers by its evaluation of made-up series."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

HOST = ',job="j",instance="i",model_name="m",engine="0"'


def found(program: str) -> str:
    """Return the path of a program of Prometheus or VictoriaMetrics."""
    path = shutil.which(program)
    assert path, (
        f"{program} is missing (Debian: prometheus, victoria-metrics); `make test-all ONLY=prometheus` installs both"
    )
    return path


def promtool(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run it; return what came of it."""
    return subprocess.run(
        [found("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False, **more
    )


def passed(*arguments: object, **more: Any) -> str:
    """Run it, and let it find no fault; return what it said."""
    said = promtool(*arguments, **more)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def answers(
    tmp_path: Path, series: dict[str, str], expr: str, at: str = "10m", label: str = "connector"
) -> dict[str, float]:
    """Return an expression's values by connector, or another label, for series written without host labels."""
    filled = re.sub(r"\$(job|instance|model_name|engine|connector|role)\b", ".+", expr)
    filled = filled.replace("$__rate_interval", "4m").replace("$cluster", ".*")
    whole = {
        name if "job=" in name else name.replace("}", HOST + "}").replace("{,", "{"): values
        for name, values in series.items()
    }
    made = [{"series": name, "values": values} for name, values in whole.items()]
    file = tmp_path / "test.yml"
    # An expectation that nothing meets: promtool then prints what there is.
    asked = {"expr": filled, "eval_time": at, "exp_samples": [{"labels": '{nobody="x"}', "value": 0}]}
    tests: list[dict[str, Any]] = [{"interval": "1m", "input_series": made, "promql_expr_test": [asked]}]
    file.write_text(json.dumps({"tests": tests}))
    done = promtool("test", "rules", file)
    got = re.search(r"got:\s*(.*)", done.stdout + done.stderr)
    assert got, done.stdout + done.stderr
    samples = re.findall(r"(\{[^}]*\}) (\S+?)(?:,|$)", got[1])
    values = {(re.findall(rf'\b{label}="([^"]*)"', labels) or [""])[0]: float(value) for labels, value in samples}
    assert len(values) == len(samples), got[1]
    return values
