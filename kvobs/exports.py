"""The boards, rules, manifests and settings that come with kvobs, and copies of them for a site's own repository.

An installed package has them inside; a checkout has them where they are made.
"""

from pathlib import Path

PACKAGE = Path(__file__).parent
SHIPPED = PACKAGE / "exported"
CHECKOUT = PACKAGE.parent / "dashboards"
PLACES = {"boards": "generated/boards", "rules": "generated/rules", "kubernetes": "generated/kubernetes",
          "stack": "stack", "runbook.md": "runbook.md"}  # fmt: skip
"""By their place in an export: where they are in a checkout's ``dashboards``. pyproject.toml says the same."""


def contents(shipped: Path = SHIPPED, checkout: Path = CHECKOUT) -> dict[str, bytes]:
    """Return all files by their place; ValueError where this installation has none."""
    roots = {place: shipped / place for place in PLACES}
    if not shipped.is_dir():
        roots = {place: checkout / source for place, source in PLACES.items()}
    if missing := [str(root) for root in roots.values() if not root.exists()]:
        raise ValueError(f"this installation of kvobs is not whole: {', '.join(missing)} is missing; install it again")
    return {
        str(place / path.relative_to(root)): path.read_bytes()
        for place, root in ((Path(place), root) for place, root in roots.items())
        for path in sorted([root] if root.is_file() else filter(Path.is_file, root.rglob("*")))
    }


def export(folder: Path, files: dict[str, bytes], *, force: bool = False) -> list[str]:
    """Write what this folder does not have yet, or has otherwise; return that.

    ValueError, and nothing is written, where a file there is another one and there is no ``force``.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: a folder is wanted, new or not")
    differing = [path for path, content in files.items() if not _is(folder / path, content)]
    taken = [path for path in differing if (folder / path).exists()]
    if taken and not force:
        raise ValueError(f"{folder} has other files of these names: {', '.join(taken)}; --force overwrites them")
    for path in differing:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(files[path])
    return differing


def _is(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
