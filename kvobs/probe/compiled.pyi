from kvobs.probe.pure import Clock, PureProbe

VERSION: int

class Probe(PureProbe):
    def __init__(
        self, words: memoryview, ring: int, buckets: bytes, total: int, clock: Clock | None = None, /
    ) -> None: ...
