"""How vLLM versions and third-party packages get into the cache folder: what is kept, and what an error says."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.connectors import packages

from . import hosts

VERSION = "0.33.0"


def quiet(line: str) -> None:
    """Print no progress."""


class Source(NamedTuple):
    """What fetches one thing into a folder; ``asked`` are the fetches so far."""

    fetch: Callable[[], Any]
    folder: Path
    asked: list[str]
    file: str
    refusal: tuple[str, ...]
    """Parts of the message where it can't be had."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVOBS_HOSTS_DIR", str(tmp_path / "hosts"))
    return tmp_path / "hosts"


@pytest.fixture(params=["vllm", "ray"])
def source(cache: Path, request: pytest.FixtureRequest) -> Source:
    if request.param == "vllm":
        refusal = (f"vLLM {VERSION} can't be downloaded: ERROR: ", f"vllm=={VERSION}")
        fetch = lambda: hosts.prepare([VERSION], say=quiet)  # noqa: E731
        return Source(fetch, cache / VERSION, [], "vllm/__init__.py", refusal)
    refusal = ("the packages of ray can't be installed: ERROR: ", "ray==2.60.0")
    return Source(lambda: packages.fetch(["ray"], say=quiet), cache / "connectors" / "ray", [], "ray.py", refusal)


@pytest.fixture
def downloads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put small files in the place of real wheels and packages."""

    def download(target: Path, requirements: list[str], version: str) -> list[Path]:
        source.asked.extend(requirements)
        for name, files in {
            "vllm": ["vllm/__init__.py", "vllm/_C.abi3.so", "vllm/csrc/big.hpp", f"vllm-{VERSION}.dist-info/METADATA"],
            "orjson": ["orjson/__init__.py", "orjson/orjson.so", "orjson-3.dist-info/METADATA"],
        }.items():
            with zipfile.ZipFile(target / f"{name}-1-py3-none-any.whl", "w") as wheel:
                for file in files:
                    wheel.writestr(file, "")
        return sorted(target.glob("*.whl"))

    def install(name: str, place: Path) -> None:
        source.asked.append(name)
        place.mkdir()
        (place / f"{name}.py").touch()

    monkeypatch.setattr(hosts, "_download", download)
    monkeypatch.setattr(packages, "_install", install)


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize("source", ["vllm"], indirect=True)
def test_only_python_files_are_kept_of_vllm_and_everything_of_its_extras(source: Source) -> None:
    assert source.fetch() == {VERSION: source.folder}
    kept = {str(file.relative_to(source.folder)) for file in source.folder.rglob("*") if file.is_file()}
    assert kept == {
        "vllm/__init__.py",
        f"vllm-{VERSION}+cpu.dist-info/METADATA",
        "orjson/__init__.py",
        "orjson/orjson.so",
        "orjson-3.dist-info/METADATA",
        hosts.STAMP,
    }
    assert source.asked == [f"vllm=={VERSION}", "orjson"]


@pytest.mark.usefixtures("downloads")
def test_what_is_complete_is_not_fetched_again(source: Source) -> None:
    assert list(source.fetch().values()) == [source.folder]
    asked = list(source.asked)
    source.fetch()
    assert source.asked == asked


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize("stamp", [None, "an older recipe"])
def test_a_half_filled_or_outdated_folder_is_made_anew(source: Source, stamp: str | None) -> None:
    leftover = source.folder / "vllm" / "leftover.py"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    if stamp is not None:
        (source.folder / hosts.STAMP).write_text(stamp)
    source.fetch()
    assert not leftover.exists()
    assert (source.folder / source.file).exists()


def test_what_can_not_be_had_is_named_with_command_and_way_out(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "FIND_LINKS": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(hosts.HostUnavailableError) as caught:
        source.fetch()
    for part in (*source.refusal, "KVOBS_HOSTS_DIR"):
        assert part in str(caught.value)
    assert not (source.folder / hosts.STAMP).exists()


def test_the_installed_version_needs_no_folder(cache: Path) -> None:
    assert hosts.prepare([hosts.INSTALLED]) == {hosts.INSTALLED: None}
    assert not cache.exists()


def test_an_unknown_name_names_the_known_ones(cache: Path) -> None:
    with pytest.raises(hosts.HostUnavailableError, match=r"no recipe for vLLM 0\.1\.0; known: 0\.28\.0, 0\.30\.0"):
        hosts.prepare(["0.1.0"])
    with pytest.raises(hosts.HostUnavailableError, match="no packages called rai; known: lmcache, mooncake, moriio, r"):
        packages.fetch(["rai"])


def test_every_package_is_pinned_and_a_change_of_them_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("==" in requirement for wanted in packages.PACKAGES.values() for requirement in wanted)
    recipe = packages._recipe("ray")
    monkeypatch.setitem(packages.PACKAGES, "ray", ("ray==1.0",))
    assert packages._recipe("ray") != recipe
