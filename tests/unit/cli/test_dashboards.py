"""What `kvobs dashboards export` writes, from a checkout and from a wheel."""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvobs.cli import app, dashboards

ROOT = Path(__file__).parents[3]
FILES = {"boards/a.json": b"{}", "runbook.md": b"# Runbook\n", "stack/grafana/x.yaml": b""}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkout_has_all_that_is_made() -> None:
    files = dashboards.sources()
    for place, source in dashboards.PLACES.items():
        path = ROOT / "dashboards" / source
        expected = (
            {"": path.read_bytes()} if path.is_file() else {f"/{name}": text for name, text in tree(path).items()}
        )
        assert {
            name.removeprefix(place): text for name, text in files.items() if f"{name}/".startswith(f"{place}/")
        } == expected
    assert len([name for name in files if name.startswith("boards/")]) == 4


def test_the_places_are_those_of_the_wheel() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["force-include"] == {
        f"dashboards/{source}": f"kvobs/exported/{place}" for place, source in dashboards.PLACES.items()
    }


def test_a_wheel_exports_what_a_checkout_does_byte_by_byte(tmp_path: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    command = [str(uv), "build", "--quiet", "--wheel", "--out-dir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert (tmp_path / "site/kvobs/testing/rig.py").is_file(), "for connectors' own tests"
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import kvobs; assert 'site' in kvobs.__file__; "
        "from kvobs.cli import app; app()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "site"), "dashboards", "export", str(tmp_path / "out")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    files = dashboards.contents()
    assert tree(tmp_path / "out") == files
    assert f"{len(files)} files written, 0 unchanged" in said.stdout


def test_an_installation_that_is_not_whole_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "exported/boards").mkdir(parents=True)
    with pytest.raises(
        ValueError,
        match=r"is incomplete: \S*rules, \S*kubernetes, \S*kustomization.yaml, \S*stack, \S*runbook.md, "
        r"\S*settings.json is missing",
    ):
        dashboards.contents(None, tmp_path / "exported", tmp_path)


def test_what_differs_is_overwritten_only_by_force_and_else_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "boards").mkdir()
    (tmp_path / "boards/a.json").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"boards/a.json; --force"):
        dashboards.export(tmp_path, FILES)
    assert tree(tmp_path) == {"boards/a.json": b"mine"}
    assert dashboards.export(tmp_path, FILES, force=True) == list(FILES)
    assert tree(tmp_path) == FILES


@given(st.sets(st.sampled_from(sorted(FILES))))
def test_only_what_is_missing_is_written(present: set[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dashboards.export(folder, {path: FILES[path] for path in present})
        assert set(dashboards.export(folder, FILES)) == FILES.keys() - present
        assert tree(folder) == FILES


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        dashboards.export(tmp_path / "x", FILES)


def kvobs(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command_says_what_it_wrote_and_what_was_there(tmp_path: Path) -> None:
    code, output = kvobs("dashboards", "export", str(tmp_path / "new"))
    assert code == 0
    assert [line for line in output.splitlines() if line.endswith("runbook.md")] == [str(tmp_path / "new/runbook.md")]
    assert kvobs("dashboards", "export", str(tmp_path / "new"))[1].startswith("0 files written")


def test_the_command_ends_with_one_line_where_it_can_not(tmp_path: Path) -> None:
    (tmp_path / "runbook.md").write_text("mine")
    code, output = kvobs("dashboards", "export", str(tmp_path))
    assert code == 1
    assert "different files with these names: runbook.md" in output
    assert kvobs("dashboards", "export", "/proc/kvobs")[0] == 1
