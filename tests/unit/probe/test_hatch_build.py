"""A wheel has the compiled probe where it can be compiled; else it is built without, and says why."""

import ctypes
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvobs.probe import hatch_build
from kvobs.probe.hatch_build import BUILT, IN_PLACE, SOURCE, CompiledProbe

ROOT = Path(hatch_build.__file__).parents[2]


def built(root: Path, version: str = "standard") -> tuple[dict[str, Any], str]:
    """Return what the hook wants of the build, and its warning."""
    app = Mock()
    hook = CompiledProbe(str(root), {}, Mock(), Mock(), str(root), "wheel", app)
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize(version, data)
    for place in data["force_include"]:
        assert ctypes.CDLL(place).PyInit_compiled
    hook.finalize(version, data, "")
    return data, "".join(str(call.args[0]) for call in app.display_warning.call_args_list)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    (tmp_path / SOURCE).write_bytes((ROOT / SOURCE).read_bytes())
    return tmp_path


def test_a_wheel_is_for_this_python_or_newer_on_this_machine(root: Path) -> None:
    data, warning = built(root)
    ((place, within),) = data.pop("force_include").items()
    machine = sysconfig.get_platform().replace("-", "_")
    assert (data, warning) == ({"pure_python": False, "tag": f"cp3{sys.version_info.minor}-abi3-{machine}"}, "")
    assert within == BUILT
    assert not Path(place).exists(), "nothing is left of it"


def test_an_editable_one_stays_in_place(root: Path) -> None:
    built(root, "editable")
    assert (root / IN_PLACE).exists()


WITHOUT = "kvobs is built without its compiled probe, and counts in Python: "


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"KVOBS_NATIVE": "0"}, "KVOBS_NATIVE=0"),
        ({"CC": "no-such-compiler"}, "no compiler: [Errno 2] No such file or directory: 'no-such-compiler'"),
        ({"CC": "sh -c 'echo wrong >&2; exit 1'"}, "wrong"),
        ({"is_free_threaded": "1"}, "it is for CPython with its GIL only"),
    ],
)
def test_without_a_compiler_it_is_built_without_and_says_so(
    variables: dict[str, str], reason: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / IN_PLACE).touch()  # of an earlier build
    if variables.pop("is_free_threaded", None):
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    data, warning = built(root, "editable")
    assert data == {"force_include": {}}
    assert warning.startswith(WITHOUT)
    assert warning.endswith(reason)
    if "CC" in variables:
        assert not (root / IN_PLACE).exists(), "an old one would not fit"
