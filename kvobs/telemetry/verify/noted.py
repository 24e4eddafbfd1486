"""Keep the fingerprints of blocks by their content, and compare those of loaded blocks with them: pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Outcome = Literal["match", "lossy", "mismatch", "unknown"]

BLOCKS_AT_MOST = 16_384
VARIANTS_AT_MOST = 4  # the same tokens computed in another batch may differ in the last bits
NEAR = 0.2  # of a value, and of the usual value: what 4 bits leave of it
NEAR_SHARE = 0.8  # of the values


class Fingerprint(NamedTuple):
    """A block's bytes in short: ``digest`` changes with any of them, ``values`` are some of its numbers.

    ``largest`` is the largest absolute value of all.
    """

    digest: int
    values: NDArray[np.float32]
    largest: float


class NotedBlocks:
    """The fingerprints of computed blocks by group and content, the last ``at_most``."""

    def __init__(self, at_most: int = BLOCKS_AT_MOST) -> None:
        self._at_most = at_most
        self._noted: dict[tuple[int, bytes], list[Fingerprint]] = {}

    def note(self, group: int, key: bytes, fingerprint: Fingerprint) -> None:
        """Keep the fingerprint of a computed block."""
        variants = self._noted.pop((group, key), [])
        if all(fingerprint.digest != each.digest for each in variants):
            variants = [*variants[1 - VARIANTS_AT_MOST :], fingerprint]
        self._noted[group, key] = variants
        if len(self._noted) > self._at_most:
            del self._noted[next(iter(self._noted))]

    def compare(self, group: int, key: bytes, fingerprint: Fingerprint) -> Outcome:
        """Return how a loaded block differs from the computed ones of the same tokens.

        It is ``lossy`` if most values are near: a compressed copy, or one that was computed elsewhere.
        """
        if (variants := self._noted.get((group, key))) is None:
            return "unknown"
        if any(fingerprint.digest == each.digest for each in variants):
            return "match"
        return "lossy" if any(_is_near(fingerprint, each) for each in variants) else "mismatch"

    def __len__(self) -> int:
        return len(self._noted)


def _is_near(a: Fingerprint, b: Fingerprint) -> bool:
    # A comparison with NaN is false.
    if not max(a.largest, b.largest) <= 2 * min(a.largest, b.largest):
        return False
    usual = np.sqrt(np.mean(np.square(b.values)))
    with np.errstate(invalid="ignore"):
        near = np.abs(a.values - b.values) <= NEAR * (np.abs(b.values) + usual)
    return bool(np.mean(near) >= NEAR_SHARE)
