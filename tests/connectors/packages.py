"""Fetch the third-party packages that real connectors and Ray need, each set into a folder of its own, once.

A folder is put on ``PYTHONPATH`` by the tests that need it: installed without their dependencies, the packages change
nothing in the environment of vLLM. Run me to fetch them all::

    python -m tests.connectors.packages [NAME ...]
"""

import hashlib
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.hosts import HostUnavailableError, cache_folder, filled, pip

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
    place, begins = cache_folder() / "connectors" / name, f"installing {', '.join(PACKAGES[name])}"
    return filled(place, _recipe(name), lambda: _install(name, place), begins, lambda said: say(f"{name}: {said}"))


def _install(name: str, place: Path) -> None:
    pip(f"the packages of {name} can't be installed", "install", "--target", str(place), *PACKAGES[name])


def _recipe(name: str) -> str:
    """Fingerprint of what is installed: a folder with anything else in it is made anew."""
    return f"{name} {hashlib.sha256(repr(PACKAGES[name]).encode()).hexdigest()[:16]} {sys.version_info[:2]}"


if __name__ == "__main__":
    try:
        for fetched, where in fetch(sys.argv[1:] or PACKAGES).items():
            print(f"{fetched}: {where}")
    except HostUnavailableError as problem:
        sys.exit(str(problem))
