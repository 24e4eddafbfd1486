"""vLLM's Rust front end: a program of its own, which only vLLM's wheel for accelerators brings."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.contract.hosts import cache_folder

VERSION = "0.33.0"
_INSIDE = "vllm/vllm-rs"


def rust_front_end() -> Path:
    """Return the program, fetched from that version's wheel (340 MB, of which it is 60) unless it is there already."""
    program = cache_folder() / "rust" / VERSION / "vllm-rs"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", folder, f"vllm=={VERSION}"], check=True, timeout=600)
        (wheel,) = Path(folder).glob("*.whl")
        program.parent.mkdir(parents=True, exist_ok=True)
        partial = program.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive:
            partial.write_bytes(archive.read(_INSIDE))
        partial.chmod(0o755)
        partial.rename(program)
    return program
