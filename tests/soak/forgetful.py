"""A steered child for servers under soak: it saves nothing, so that its memory stays flat."""

from __future__ import annotations

from typing import Any

from tests.engine.children_steered import SteeredChild


class ForgetfulChild(SteeredChild):
    """Does what each request's plan says, and keeps no copies of blocks."""

    def _blocks_to_save(self, tracked: Any) -> list[tuple[int, str]]:
        return []
