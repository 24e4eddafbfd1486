"""The model of the incidents' servers."""

from tests.engine.conftest import model

__all__ = ["model"]
