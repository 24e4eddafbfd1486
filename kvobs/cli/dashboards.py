"""Write the boards, rules, manifests and settings that come with kvobs to a folder, with the settings of a site.

An installed package contains them; a checkout has them where they are generated.
"""

import json
from pathlib import Path

from kvobs.cli.site import Site, fill

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "exported"
CHECKOUT = PACKAGE.parent / "dashboards"
SETTINGS = "settings.json"
PLACES = {"boards": "generated/boards", "rules": "generated/templates/rules",
          "kubernetes": "generated/templates/kubernetes", "kustomization.yaml": "generated/kustomization.yaml",
          "stack": "stack", "runbook.md": "runbook.md",
          SETTINGS: f"generated/templates/{SETTINGS}"}  # fmt: skip
"""Place in an export -> place in a checkout's ``dashboards``; pyproject.toml has the same pairs.

Rules and manifests are templates, and the settings are what fills them: see ``site``.
"""


def contents(site: Site | None = None, shipped: Path = SHIPPED, checkout: Path = CHECKOUT) -> dict[str, bytes]:
    """Return all files of an export by their place; ValueError if some are missing, or for a wrong setting."""
    files = sources(shipped, checkout)
    defaults = json.loads(files.pop(SETTINGS))
    return {path: fill(path, content, site or Site(), defaults) for path, content in files.items()}


def sources(shipped: Path = SHIPPED, checkout: Path = CHECKOUT) -> dict[str, bytes]:
    """Return all files by their place, as they come with kvobs; ValueError if some are missing."""
    roots = {place: shipped / place for place in PLACES}
    if not shipped.is_dir():
        roots = {place: checkout / source for place, source in PLACES.items()}
    if missing := [str(root) for root in roots.values() if not root.exists()]:
        raise ValueError(f"this installation of kvobs is incomplete: {', '.join(missing)} is missing; reinstall kvobs")
    return {
        str(place / path.relative_to(root)): path.read_bytes()
        for place, root in ((Path(place), root) for place, root in roots.items())
        for path in sorted([root] if root.is_file() else filter(Path.is_file, root.rglob("*")))
    }


def export(folder: Path, files: dict[str, bytes], *, force: bool = False) -> list[str]:
    """Write the files that are missing or different in a folder; return their places.

    Raises:
        ValueError: a file there is different and ``force`` is not set; nothing is written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder")
    differing = [path for path, content in files.items() if not _is(folder / path, content)]
    taken = [path for path in differing if (folder / path).exists()]
    if taken and not force:
        raise ValueError(f"{folder} has different files with these names: {', '.join(taken)}; --force overwrites them")
    for path in differing:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(files[path])
    return differing


def _is(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
