"""Compile the probe when kvobs is built; where that can't be done, build kvobs without it.

Hatchling runs this; nothing of kvobs imports it. ``CC`` is the compiler, and KVOBS_NATIVE=0 leaves the probe out.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE, BUILT = "kvobs/probe/compiled.c", "kvobs/probe/compiled.abi3.so"
IN_PLACE = f"kvobs/probe/compiled{sysconfig.get_config_var('EXT_SUFFIX')}"
"""Of an editable installation: each Python has its file."""
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")


def refusal() -> str:
    """Return why this Python, or whoever builds, wants no compiled probe; empty: it does."""
    if os.environ.get("KVOBS_NATIVE") == "0":
        return "KVOBS_NATIVE=0"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is for CPython with its GIL only"
    return ""


def compile_probe(root: Path, built: Path) -> str:
    """Compile the probe; return why that was not possible, or nothing."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, *FLAGS, f"-I{sysconfig.get_paths()['include']}", SOURCE, "-o", str(built)]
    try:
        subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    except OSError as error:
        return f"no compiler: {error}"
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(command)} failed: {error.stderr.strip()[-2000:]}"
    return ""


class CompiledProbe(BuildHookInterface[Any]):
    """Adds the compiled probe to a wheel, which then serves this CPython and newer ones on this kind of machine.

    Not older ones: some macros of newer headers do not keep what the limited API promises to them.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected; ``version``: standard, or editable, whose files stay in place."""
        root = Path(self.root)
        self.folder = None if version == "editable" else TemporaryDirectory()
        built = Path(self.folder.name, Path(BUILT).name) if self.folder else root / IN_PLACE
        built.unlink(missing_ok=True)
        if reason := refusal() or compile_probe(root, built):
            self.app.display_warning(f"kvobs is built without its compiled probe, and counts in Python: {reason}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data.update(pure_python=False, tag=f"cp3{sys.version_info.minor}-abi3-{platform}")
        build_data["force_include"][str(built)] = BUILT if self.folder else IN_PLACE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled, which is in the wheel now."""
        if self.folder is not None:
            self.folder.cleanup()
