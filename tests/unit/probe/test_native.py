"""The compiled probe runs where it is, unless the environment says no; the reason is named where it does not."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvobs import probe as room
from kvobs.probe import native
from kvobs.probe.native import VERSION, Choice, choice
from kvobs.probe.pure import PureProbe
from kvobs.testing import Rig, Script


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    choice.cache_clear()
    yield
    choice.cache_clear()


def test_the_compiled_one_runs_where_it_is() -> None:
    assert choice() == Choice(True)
    page = memoryview(bytearray(800)).cast("q")
    assert type(native.probe(page, 90, bytes(65), 12)).__module__ == "kvobs.probe.compiled"


def test_the_variable_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOBS_NATIVE", "0")
    assert choice() == Choice(False, "KVOBS_NATIVE=0")
    assert type(native.probe(memoryview(bytearray(800)).cast("q"), 90, bytes(65), 12)) is PureProbe


def test_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("kvobs.probe.compiled")
    other.VERSION, other.__file__ = VERSION + 1, "/there/compiled.abi3.so"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, other.__name__, other)
    monkeypatch.setattr(room, "compiled", other, raising=False)
    reason = f"/there/compiled.abi3.so has version {VERSION + 1}, and this kvobs needs {VERSION}"
    assert choice() == Choice(False, reason)


def test_a_library_that_can_not_be_loaded_is_named(tmp_path: Path) -> None:
    """As a library for another machine: the dynamic linker refuses it."""
    (tmp_path / "compiled.abi3.so").write_bytes(b"not ELF")
    program = (
        f"import sys; import kvobs.probe; kvobs.probe.__path__.insert(0, {str(tmp_path)!r}); "
        "from kvobs.probe.native import choice; print(choice().reason)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert str(tmp_path) in ran.stdout


def test_the_start_says_which_one_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    page = " ".join((Path(__file__).parents[3] / "docs/options.md").read_text().split())
    for value, line in (
        ("", "calls are counted by the compiled probe"),
        ("0", "calls are counted in Python: KVOBS_NATIVE=0"),
    ):
        choice.cache_clear()
        caplog.clear()
        monkeypatch.setenv("KVOBS_NATIVE", value)
        with caplog.at_level(logging.INFO):
            Rig("kvobs", Script("one"))
        assert line in caplog.messages
        assert line.partition(":")[0] in page
