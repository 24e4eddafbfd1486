"""How vLLM versions and third-party packages get into the cache folder: what is kept, and what an error says."""

import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.connectors import packages

from . import hosts

VERSION = "0.33.0"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVOBS_HOSTS_DIR", str(tmp_path / "hosts"))
    return tmp_path / "hosts"


def test_of_vllm_and_its_extras_only_python_files_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(target: Path, *_: Any) -> list[Path]:
        for name, files in {
            "vllm": ["vllm/__init__.py", "vllm/_C.abi3.so", "vllm/csrc/big.hpp", f"vllm-{VERSION}.dist-info/METADATA"],
            "orjson": ["orjson/__init__.py", "orjson/orjson.so", "orjson-3.dist-info/METADATA"],
        }.items():
            with zipfile.ZipFile(target / f"{name}-1-py3-none-any.whl", "w") as wheel:
                for file in files:
                    wheel.writestr(file, "")
        return sorted(target.glob("*.whl"))

    monkeypatch.setattr(hosts, "_download", download)
    folder = cache / VERSION
    assert hosts.prepare([VERSION]) == {VERSION: folder}
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        *("vllm/__init__.py", f"vllm-{VERSION}+cpu.dist-info/METADATA", hosts.STAMP),
        *("orjson/__init__.py", "orjson/orjson.so", "orjson-3.dist-info/METADATA"),
    }


@pytest.mark.parametrize("stamp", [None, "an older recipe"])
def test_only_an_incomplete_or_outdated_folder_is_made_anew(
    stamp: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def install(name: str, place: Path) -> None:
        fetched.append(name)
        place.mkdir()

    monkeypatch.setattr(packages, "_install", install)
    folder = cache / "connectors" / "ray"
    folder.mkdir(parents=True)
    (folder / "leftover.py").touch()
    if stamp is not None:
        (folder / hosts.STAMP).write_text(stamp)
    for _ in range(2):
        assert packages.fetch(["ray"]) == {"ray": folder}
    assert not (folder / "leftover.py").exists()
    assert fetched == ["ray"]


@pytest.mark.parametrize(
    ("fetch", "refusal"),
    [
        (partial(hosts.prepare, [VERSION]), (f"vLLM {VERSION} can't be downloaded: ERROR: ", f"vllm=={VERSION}")),
        (partial(packages.fetch, ["ray"]), ("the packages of ray can't be installed: ERROR: ", "ray==2.60.0")),
    ],
    ids=["vllm", "ray"],
)
def test_version_that_can_not_be_had_is_named_with_a_way_out(
    fetch: Any, refusal: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "FIND_LINKS": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(hosts.HostUnavailableError) as caught:
        fetch()
    assert all(part in str(caught.value) for part in (*refusal, "KVOBS_HOSTS_DIR"))
    assert not list(cache.rglob(hosts.STAMP))


def test_installed_vllm_needs_no_folder_and_unknown_names_fail(cache: Path) -> None:
    assert hosts.prepare([hosts.INSTALLED]) == {hosts.INSTALLED: None}
    assert not cache.exists()
    with pytest.raises(hosts.HostUnavailableError, match=r"no recipe for vLLM 0\.1\.0; known: 0\.28\.0, 0\.30\.0"):
        hosts.prepare(["0.1.0"])
    with pytest.raises(hosts.HostUnavailableError, match="no packages called rai; known: lmcache, mooncake, moriio, r"):
        packages.fetch(["rai"])


def test_every_package_is_pinned_and_a_change_of_them_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("==" in requirement for wanted in packages.PACKAGES.values() for requirement in wanted)
    recipe = packages._recipe("ray")
    monkeypatch.setitem(packages.PACKAGES, "ray", ("ray==1.0",))
    assert packages._recipe("ray") != recipe
