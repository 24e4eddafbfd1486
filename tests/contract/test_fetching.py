"""How versions get into the cache folder: what is kept of a wheel, when it is fetched again, what an error says."""

import zipfile
from pathlib import Path

import pytest

from . import hosts

VERSION = "0.33.0"


def quiet(line: str) -> None:
    """Print no progress."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVOBS_HOSTS_DIR", str(tmp_path / "hosts"))
    return tmp_path / "hosts"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Put small wheels in the place of real ones; return what was asked for."""
    asked: list[list[str]] = []

    def download(target: Path, requirements: list[str], version: str) -> list[Path]:
        asked.append(requirements)
        for name, files in {
            "vllm": ["vllm/__init__.py", "vllm/_C.abi3.so", "vllm/csrc/big.hpp", f"vllm-{VERSION}.dist-info/METADATA"],
            "orjson": ["orjson/__init__.py", "orjson/orjson.so", "orjson-3.dist-info/METADATA"],
        }.items():
            with zipfile.ZipFile(target / f"{name}-1-py3-none-any.whl", "w") as wheel:
                for file in files:
                    wheel.writestr(file, "")
        return sorted(target.glob("*.whl"))

    monkeypatch.setattr(hosts, "_download", download)
    return asked


def test_only_python_files_are_kept_of_vllm_and_everything_of_its_extras(
    cache: Path, downloads: list[list[str]]
) -> None:
    folder = hosts.prepare([VERSION], say=quiet)[VERSION]
    assert folder == cache / VERSION
    kept = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert kept == {
        "vllm/__init__.py",
        f"vllm-{VERSION}+cpu.dist-info/METADATA",
        "orjson/__init__.py",
        "orjson/orjson.so",
        "orjson-3.dist-info/METADATA",
        hosts.STAMP,
    }
    assert downloads == [[f"vllm=={VERSION}", "orjson"]]


def test_what_is_complete_is_not_fetched_again(cache: Path, downloads: list[list[str]]) -> None:
    first = hosts.prepare([VERSION], say=quiet)
    assert hosts.prepare([VERSION], say=quiet) == first
    assert len(downloads) == 1


@pytest.mark.parametrize("stamp", [None, "an older recipe"])
def test_a_half_filled_or_outdated_folder_is_made_anew(
    cache: Path, downloads: list[list[str]], stamp: str | None
) -> None:
    leftover = cache / VERSION / "vllm" / "leftover.py"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    if stamp is not None:
        (cache / VERSION / hosts.STAMP).write_text(stamp)
    hosts.prepare([VERSION], say=quiet)
    assert not leftover.exists()
    assert (cache / VERSION / "vllm" / "__init__.py").exists()


def test_the_installed_version_needs_no_folder(cache: Path) -> None:
    assert hosts.prepare([hosts.INSTALLED]) == {hosts.INSTALLED: None}
    assert not cache.exists()


def test_an_unknown_version_names_the_known_ones(cache: Path) -> None:
    with pytest.raises(hosts.HostUnavailableError, match=r"no recipe for vLLM 0\.1\.0; known: 0\.28\.0, 0\.30\.0"):
        hosts.prepare(["0.1.0"])


def test_a_wheel_that_can_not_be_had_names_version_command_and_way_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(hosts.HostUnavailableError) as caught:
        hosts.prepare([VERSION], say=quiet)
    message = str(caught.value)
    for part in (f"vLLM {VERSION} can't be downloaded: ERROR: ", f"vllm=={VERSION}", "KVOBS_HOSTS_DIR"):
        assert part in message
    assert not (cache / VERSION / hosts.STAMP).exists()
