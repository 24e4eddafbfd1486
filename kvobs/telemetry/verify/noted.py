"""Keep the fingerprints of blocks by their content, and compare the fingerprints of loaded blocks with them: pure."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Outcome = Literal["match", "lossy", "mismatch", "unknown"]

BLOCKS_AT_MOST = 16_384
VARIANTS_AT_MOST = 4  # the same tokens computed in another batch may differ in the last bits
NEAR = 0.2  # of a value, and of the usual value: what 4 bits leave of it
NEAR_SHARE = 0.8  # of the values
FAR = 0.25  # the same: the last bit of an FP8 number, which differs in another batch, is less
SAME_SHARE = 0.4  # of the values; compression leaves fewer of them as they were
PACKED = inf  # the largest value of a block that has bytes of several meanings, such as numbers and their scales
_SENT = struct.Struct("<Iq9f")  # form, digest, largest value, 8 values


class Fingerprint(NamedTuple):
    """A block's bytes in short: ``digest`` changes with any of them, ``values`` are some of its numbers.

    ``largest`` is the largest absolute value of all; with ``PACKED`` the values are bytes.
    """

    digest: int
    values: NDArray[np.float32]
    largest: float

    def sent(self, form: int) -> str:
        """Return it for another engine; ``form`` is equal where fingerprints can be compared."""
        values = self.values[:: len(self.values) // 8][:8]
        return b64encode(_SENT.pack(form, self.digest, self.largest, *values)).decode()


def compare_sent(sent: str, form: int, fingerprint: Fingerprint) -> Outcome:
    """Return how a loaded block differs from the block of another engine, which sent its fingerprint."""
    try:
        its_form, digest, largest, *values = _SENT.unpack(b64decode(sent, validate=True))
    except (ValueError, struct.error):
        return "unknown"
    if its_form != form:
        return "unknown"
    return _difference(fingerprint, [Fingerprint(digest, np.array(values, dtype=np.float32), largest)])


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

    def forget(self, group: int, key: bytes) -> None:
        """Forget the fingerprints of a block, if there are any."""
        self._noted.pop((group, key), None)

    def compare(self, group: int, key: bytes, fingerprint: Fingerprint) -> Outcome:
        """Return how a loaded block differs from the computed ones of the same tokens.

        It is ``lossy`` if most values are near: a compressed copy, or one that was computed elsewhere.
        """
        variants = self._noted.get((group, key))
        return _difference(fingerprint, variants) if variants is not None else "unknown"

    def __len__(self) -> int:
        return len(self._noted)


def _difference(fingerprint: Fingerprint, variants: Sequence[Fingerprint]) -> Outcome:
    if any(fingerprint.digest == each.digest for each in variants):
        return "match"
    return "lossy" if any(_is_near(fingerprint, each) for each in variants) else "mismatch"


def _is_near(a: Fingerprint, b: Fingerprint) -> bool:
    # A comparison with NaN is false.
    if not max(a.largest, b.largest) <= 2 * min(a.largest, b.largest):
        return False
    values = a.values[:: len(a.values) // len(b.values)][: len(b.values)]
    if not len(used := np.flatnonzero((values != 0) | (b.values != 0))):
        return True
    loaded, noted = values[used], b.values[used]
    if b.largest == PACKED:  # a last bit may change a byte in any way; of unrelated bytes few are the same
        return bool(np.mean(loaded == noted) >= SAME_SHARE)
    usual = np.sqrt(np.mean(np.square(noted)))
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(loaded - noted) / (np.abs(noted) + usual)
    # Compression changes nearly all numbers, each a little. Of a partly wrong block many are the same, and others far.
    changed = off[loaded != noted]
    if len(changed) < (1 - SAME_SHARE) * len(off) and not (changed <= FAR).all():
        return False
    return bool(np.mean(off <= NEAR) >= NEAR_SHARE)
