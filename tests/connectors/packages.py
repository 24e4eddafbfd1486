"""Fetch the third-party packages that real connectors and Ray need, each set into a folder of its own, once.

A folder is put on ``PYTHONPATH`` by the tests that need it: installed without their dependencies, the packages change
nothing in the environment of vLLM. Run me to fetch them all::

    python -m tests.connectors.packages [NAME ...]
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.hosts import STAMP, HostUnavailableError, _errors, _pip, _stamp, cache_folder

PACKAGES: dict[str, tuple[str, ...]] = {
    # What lmcache imports on a CPU and vLLM does not bring. Left out: CUDA's libraries and Google's clients.
    "lmcache": (
        "lmcache==0.5.6",
        "aiofile==3.12.3",
        "aiofiles==25.1.0",
        "awscrt==0.38.1",
        "caio==0.12.10",
        "nvtx==0.2.17",
        "opentelemetry-exporter-prometheus==0.66b2",
        "redis==8.1.0",
        "sortedcontainers==2.4.0",
    ),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "msgpack==1.2.4"),
    "moriio": ("msgpack==1.2.4",),  # imported by vLLM's connector; AMD's library has a stand-in
    "ray": ("ray==2.60.0", "msgpack==1.2.4"),
    "redhare": ("redhare==0.6.0",),
    "spoolcache": ("spoolcache==0.3.0",),
    "triton": ("triton==3.9.0",),  # for its interpreter, a gigabyte; in .venv vLLM would find it
}
"""Per folder, what is installed in it; everything else that these import is in vLLM's own environment."""

INSTALL_TIMEOUT_S = 600


def version(name: str) -> str:
    """Return the version of a set's own package, the first."""
    return PACKAGES[name][0].partition("==")[2]


def fetch(names: Iterable[str] = PACKAGES, say: Callable[[str], None] = print) -> dict[str, Path]:
    """Make these sets importable and return their folders; what is there already costs a stamp read each.

    Raises:
        HostUnavailableError: a set is not in the table, or can't be installed.
    """
    wanted = list(names)
    if unknown := sorted(set(wanted) - set(PACKAGES)):
        raise HostUnavailableError(f"no packages called {', '.join(unknown)}; known: {', '.join(PACKAGES)}")
    with ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(lambda name: _fetch_one(name, say), wanted), strict=True))


def importing(*names: str) -> list[str]:
    """Return the folders of these sets, fetched where they are missing, for ``PYTHONPATH``."""
    return [str(place) for place in fetch(names).values()]


def _fetch_one(name: str, say: Callable[[str], None]) -> Path:
    place, recipe = cache_folder() / "connectors" / name, _recipe(name)
    if _stamp(place) == recipe:
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    # Another test run may be at it: the second waits, then finds the stamp.
    with (place.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamp(place) != recipe:
            started = time.monotonic()
            say(f"{name}: installing {', '.join(PACKAGES[name])}")
            shutil.rmtree(place, ignore_errors=True)
            _install(name, place)
            (place / STAMP).write_text(recipe)
            say(f"{name}: ready in {time.monotonic() - started:.0f} s")
    return place


def _install(name: str, place: Path) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--target", str(place)]
    command = [*_pip(), "install", *options, *PACKAGES[name]]
    # Compiled now, or each process of each server compiles them for itself.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=env, check=False)
        reason = "" if done.returncode == 0 else _errors(done.stderr) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no end after {INSTALL_TIMEOUT_S} s"
    except OSError as error:
        reason = str(error)
    if reason:
        raise HostUnavailableError(
            f"the packages of {name} can't be installed: {reason}\n"
            f"command: {' '.join(command)}\n"
            f"Check the package index, or point KVOBS_HOSTS_DIR at a folder filled by an earlier run "
            f"(now: {cache_folder()})."
        )


def _recipe(name: str) -> str:
    """Fingerprint of what is installed: a folder with anything else in it is made anew."""
    return f"{name} {hashlib.sha256(repr(PACKAGES[name]).encode()).hexdigest()[:16]} {sys.version_info[:2]}"


if __name__ == "__main__":
    try:
        for fetched, where in fetch(sys.argv[1:] or PACKAGES).items():
            print(f"{fetched}: {where}")
    except HostUnavailableError as problem:
        sys.exit(str(problem))
