"""The suites of ``make test-all``: what each runs and needs, and which of them CI runs.

make test-all                              # those of CI, then a table of their times
make test-all ONLY="engines slow"          # these
make test-all ONLY=engines TESTS="-k pair" # of these, the tests that pytest is to run
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOGS = Path("build/suites")
FETCH = "fetch"
"""Of what suites need; if it fails none of those that are not among the first runs."""
OTHER_PYTHONS = ("3.12", "3.13")
"""Versions of Python that kvobs is tested under, next to that of `.venv`."""
WITHOUT_VLLM = ("cli", "export", "schema", "state", "telemetry")
"""Rooms of the unit tests that say the most about a Python."""


class When(Enum):
    """When a suite runs, where several do: the first ones side by side, and one or two next to those in turn."""

    FIRST = "first"
    """Mostly fetches, or waits for one process."""
    ALONGSIDE = "alongside"
    """Mostly waits, and asserts no time."""
    IN_TURN = "in turn"


@dataclass(frozen=True)
class Suite:
    """A suite: the shell's commands, of which each must succeed."""

    name: str
    what: str
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Targets of make that fetch what it needs."""
    when: When = When.IN_TURN
    is_in_ci: bool = True
    lacks: Callable[[], str] = str
    """Returns what this machine lacks for it, which no target fetches."""


def pytest(marked: str, where: str, *options: str, python: str = ".venv") -> str:
    """Return a call of pytest; the variable `TESTS` has other paths or options in the place of ``where``."""
    return " ".join([f"{python}/bin/python -m pytest", *options, f'-m "{marked}"', os.environ.get("TESTS") or where])


# Two files of tests at a time: an engine mostly waits for one core, when it starts and when it is asked.
SIDE_BY_SIDE = "-n 2 --dist loadfile"
# Of tests without an engine one more than there are cores: some wait for processes and clocks. In the order of the
# folders, so that the demo, which is one test in its file, does not come last.
SHARED = f"-n {(os.cpu_count() or 1) + 1} --dist loadfile --no-loadscope-reorder"
QUICK = "demo or not (slow or engine or contract or connectors or gpu_path or compose or tools)"
"""The tests of `make test`."""
LEFT_OUT = "echo 'Left out: tests that need promtool, Docker or minutes of a real engine. make test-all runs them.'"
TABLES = ".venv/bin/cog -r @docs/cog.txt"
"""Writes the tables of the docs."""
NEWER = 'PATH="$PWD/.hosts/prometheus3/usr/bin:$PATH" '
OLDER = 'PATH="$PATH:$PWD/.hosts/prometheus3/usr/bin" '
"""Debian's Prometheus, and the newer kubectl where there is none."""


def no_npm() -> str:
    return "" if shutil.which("npm") else "npm, of Node 20"


def no_python(version: str) -> str:
    """Return what is missing if there is no such Python on the PATH, without pyenv's stand-ins, or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    if any(pyenv.glob(f"versions/{version}.*/bin/python")) or not subprocess.call(
        [shutil.which(f"python{version}") or "false", "-V"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ):
        return ""
    return f"Python {version}, on the PATH or in pyenv"


def under_python(version: str, what: str, where: str) -> Suite:
    venv = f".pythons/{version}"
    return Suite(
        f"python{version}",
        f"{what} under Python {version}",
        (pytest(QUICK, where, SHARED, python=venv),),
        (f"{venv}/.installed",),
        lacks=lambda: no_python(version),
    )


SUITES = (
    Suite("lint", "`make lint`", ("make lint",), when=When.FIRST),
    Suite("site", "README, docs/ and the runbook as a site, each link checked", ("make site",), when=When.FIRST),
    Suite("boards", "the boards, by Grafana's grammar of TraceQL and the types of its schema", ("make boards",),
          when=When.FIRST, lacks=no_npm),
    Suite("probe", "the compiled probe under GCC's sanitizers, and its references counted", ("make probe",),
          when=When.FIRST),
    Suite("wheels", "the wheels: built, checked, and installed under each Python", ("make wheels",), when=When.FIRST),
    Suite("compose", "docker-compose.yml on a Docker engine: images, health, scrapes, rules, an alert",
          (pytest("compose", "tests/compose", "-rs"),),
          ("docker", ".hosts/prometheus3/usr/libexec/docker/cli-plugins/docker-compose", ".hosts/otelcol"),
          When.ALONGSIDE),
    Suite("test", "`make test`", (pytest(QUICK, "tests", SHARED), LEFT_OUT)),
    Suite("prometheus", "rules, boards, manifests and recipes of the docs, by Prometheus 2 and 3",
          (OLDER + pytest("tools", "tests/unit", SHARED), NEWER + pytest("tools", "tests/unit", SHARED)),
          ("promtool", ".hosts/prometheus3/usr/bin/kubectl")),
    under_python("3.12", "the unit tests and the demo", "tests/unit tests/engine/test_demo.py"),
    under_python("3.13", "the unit tests without an engine",
                 " ".join(f"tests/unit/{room}" for room in WITHOUT_VLLM)),
    Suite("engines", "real engines: metrics, traces, shapes of engines; other vLLM versions",
          (pytest("(engine or contract) and not (demo or slow or connectors)", "tests", SIDE_BY_SIDE),),
          ("hosts", "promtool")),
    Suite("slow", "boards on a real Prometheus, alerts of fleets, prefill and decode, faults of connectors, kills",
          (pytest("slow", "tests", SIDE_BY_SIDE, "--no-loadscope-reorder"),), ("promtool", "chromium")),
    Suite("versions", "a real engine of the oldest and of the newest vLLM",
          (".venv/bin/python -m tests.versions",)),
    Suite("connectors", "engines with real stores, which are killed: LMCache, Mooncake, Redhare, SpoolCache",
          (pytest("connectors", "tests/connectors", SIDE_BY_SIDE, "--ignore tests/connectors/servers"),
           pytest("connectors and not ray", "tests/connectors/servers", "-rP -n 2 --dist loadscope")),
          ("packages", "rdma", "redis")),
    Suite("gpu-path", "vLLM's default path on GPUs, on a CPU: the most telling of its cells",
          (pytest("gpu_path", "tests/gpu_path", SIDE_BY_SIDE),), ("packages",)),
    # By name only: they are long, or write a table of the docs.
    Suite("ray", "engines under Ray, with both of vLLM's executors for it",
          (pytest("ray", "tests/connectors", "-rP"),), ("packages",), is_in_ci=False),
    Suite("all-versions", "a real engine of each vLLM version; writes the table of docs/runs.md",
          (".venv/bin/python -m tests.versions --all", TABLES), is_in_ci=False),
    Suite("all-gpu-path", "all cells of vLLM's default path on GPUs; writes the table of docs/runs.md",
          ("KVOBS_GPU_PATH=1 " + pytest("gpu_path", "tests/gpu_path", SIDE_BY_SIDE), TABLES),
          ("packages",), is_in_ci=False),
    Suite("incidents", "connectors that hang, end, slow and fail engines; writes the table of docs/reliability.md",
          ("KVOBS_INCIDENTS=1 " + pytest("slow", "tests/incidents", SIDE_BY_SIDE), TABLES),
          ("packages", "promtool"), is_in_ci=False),
    Suite("faults", "wrong bytes in the stores of real connectors; writes the table of docs/reliability.md",
          ('KVOBS_FAULTS=1 .venv/bin/python -m pytest -k "found or named" tests/connectors/test_verify.py '
           "tests/connectors/servers/test_corrupt_stores.py tests/gpu_path/servers/test_pair.py",
           TABLES),
          ("packages", "rdma", "promtool"), is_in_ci=False),
    Suite("strangers", "what connectors do that vLLM's router does not expect; writes the table of docs/runs.md",
          ("KVOBS_STRANGERS=1 .venv/bin/python -m pytest -n 0 tests/strangers", TABLES),
          is_in_ci=False),
    Suite("mutants", "planted faults of routing: does the comparison with vLLM's router find each?",
          ("nice .venv/bin/python -m tests.transparency.planted_faults",), is_in_ci=False),
    Suite("soak", "220,000 requests with every fault there is, and servers that end in every way; half an hour",
          (".venv/bin/python -m tests.soak ${SOAK:-}", ".venv/bin/python -m tests.engine.endings"), is_in_ci=False),
)  # fmt: skip

BY_NAME = {suite.name: suite for suite in SUITES}


class UnknownSuiteError(ValueError):
    """A name that no suite has; the message lists those that there are."""


def chosen(names: Sequence[str]) -> list[Suite]:
    """Return the suites of these names in the order of the table, or those of CI; raise `UnknownSuiteError`."""
    if unknown := [name for name in names if name not in BY_NAME]:
        raise UnknownSuiteError(f"ONLY has no suite {', '.join(unknown)}; there are: {', '.join(BY_NAME)}")
    return [suite for suite in SUITES if (suite.name in names if names else suite.is_in_ci)]


@dataclass(frozen=True)
class Done:
    name: str
    seconds: float
    failed: str
    """The command that failed."""


def run(suite: Suite, log: Path | None) -> Done:
    """Run a suite up to the first command that fails; its output is in ``log``, or is shown at once."""
    begin, failed = time.monotonic(), ""
    if not log:
        print(f"\n== {suite.name}: {suite.what}", flush=True)
    for command in suite.commands:
        shell = ["bash", "-uc", command]
        if log:
            with log.open("ab") as out:
                code = subprocess.call(shell, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=out)
        else:
            code = subprocess.call(shell, cwd=ROOT, env=ENVIRONMENT)
        if code:
            failed = command
            break
    if log:
        print(f"\n== {suite.name}: {suite.what}\n{log.read_text(errors='replace')}", flush=True)
    return Done(suite.name, time.monotonic() - begin, failed)


# Without what make gives to those it calls: ONLY, and its way to limit how many run at a time.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ONLY"}
}


def run_all(suites: Sequence[Suite]) -> list[Done]:
    """Run the first suites while the needs of all are fetched; then the others in turn, with those alongside."""
    log = (ROOT / LOGS).joinpath
    log().mkdir(parents=True, exist_ok=True)
    for old in log().iterdir():
        old.unlink()
    needs = " ".join(dict.fromkeys(need for suite in suites for need in suite.needs))
    first = [suite for suite in suites if suite.when is When.FIRST]
    if needs:
        first.insert(0, Suite(FETCH, needs, (f"make --jobs=2 --output-sync {needs}",)))
    with ThreadPoolExecutor(2) as pool:
        done = results([pool.submit(run, suite, log(f"{suite.name}.log")) for suite in first])
    if any(each.name == FETCH and each.failed for each in done):
        return done
    alongside = [suite for suite in suites if suite.when is When.ALONGSIDE]
    in_turn = [suite for suite in suites if suite.when is When.IN_TURN]
    if not in_turn:
        return done + [run(suite, None) for suite in alongside]
    with ThreadPoolExecutor(1) as pool:
        behind = [pool.submit(run, suite, log(f"{suite.name}.log")) for suite in alongside]
        done += [run(suite, None) for suite in in_turn]
        return done + results(behind)


def results(futures: Iterable[Future[Done]]) -> list[Done]:
    return [future.result() for future in futures]


def report(done: Iterable[Done], left_out: Iterable[tuple[str, str]]) -> str:
    """Return the table of what ran, then what was left out, and why."""
    lines = [
        f"  {each.name:14} {each.seconds:6.0f} s  {f'FAILED: {each.failed}' if each.failed else 'passed'}"
        for each in done
    ]
    lines += [f"  {name:14}    left out: this machine has no {lacks}" for name, lacks in left_out]
    return "\n".join(["", "Suites", *lines])


def listing() -> str:
    """Return what `make help` prints of the suites."""
    ci, others = ([suite for suite in SUITES if suite.is_in_ci is is_in_ci] for is_in_ci in (True, False))
    lines = [f"  {suite.name:14} {suite.what}" for suite in ci]
    lines += ["By name only:", *(f"  {suite.name:14} {suite.what}" for suite in others)]
    return "\n".join(['Suites of `make test-all`, or of `make test-all ONLY="NAME ..."`:', *lines])


def main(arguments: Sequence[str]) -> int:
    """Run the suites of these names, or those of CI; return 1 if one failed or can't run here though it is named."""
    if "--list" in arguments:
        print(listing())
        return 0
    try:
        suites = chosen(arguments)
    except UnknownSuiteError as error:
        print(error, file=sys.stderr)
        return 2
    left_out = [(suite.name, lacks) for suite in suites if (lacks := suite.lacks())]
    lacking = {name for name, _ in left_out}
    done = run_all([suite for suite in suites if suite.name not in lacking])
    print(report(done, left_out), flush=True)
    return int(any(each.failed for each in done) or bool(arguments and left_out))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
