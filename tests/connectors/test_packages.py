"""How third-party packages get into the cache folder: once, whole, and with an error that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.connectors import packages
from tests.contract.hosts import STAMP, HostUnavailableError


def quiet(line: str) -> None:
    """Print no progress."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVOBS_HOSTS_DIR", str(tmp_path / "hosts"))
    return tmp_path / "hosts"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install one small file in the place of packages; return the names of the sets that were asked for."""
    asked: list[str] = []

    def install(name: str, place: Path) -> None:
        asked.append(name)
        place.mkdir()
        (place / f"{name}.py").touch()

    monkeypatch.setattr(packages, "_install", install)
    return asked


def test_each_set_has_a_folder_of_its_own_and_is_installed_once(cache: Path, installed: list[str]) -> None:
    for _ in range(2):
        assert packages.fetch(["ray", "mooncake"], say=quiet) == {
            name: cache / "connectors" / name for name in ("ray", "mooncake")
        }
    assert sorted(installed) == ["mooncake", "ray"]


def test_a_folder_that_is_half_filled_or_of_another_version_is_made_anew(
    cache: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = cache / "connectors" / "ray" / "leftover.py"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    packages.fetch(["ray"], say=quiet)
    assert not leftover.exists()
    monkeypatch.setitem(packages.PACKAGES, "ray", ("ray==1.0",))
    packages.fetch(["ray"], say=quiet)
    assert installed == ["ray", "ray"]


def test_every_package_is_pinned() -> None:
    assert all("==" in requirement for wanted in packages.PACKAGES.values() for requirement in wanted)


def test_an_unknown_name_names_the_known_ones(cache: Path) -> None:
    with pytest.raises(HostUnavailableError, match="no packages called rai; known: lmcache, mooncake, moriio, ray"):
        packages.fetch(["rai"])


def test_what_can_not_be_installed_names_command_and_way_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "FIND_LINKS": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(HostUnavailableError) as caught:
        packages.fetch(["ray"], say=quiet)
    for part in ("the packages of ray can't be installed: ERROR: ", "ray==2.60.0", "KVOBS_HOSTS_DIR"):
        assert part in str(caught.value)
    assert not (cache / "connectors" / "ray" / STAMP).exists()
