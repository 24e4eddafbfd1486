"""Put the wall clock of each Python process ahead: of those with this folder on ``PYTHONPATH``."""

import os
import time

_AHEAD_NS = int(os.environ["TESTS_AHEAD_NS"])
_time_ns = time.time_ns

time.time_ns = lambda: _time_ns() + _AHEAD_NS
time.time = lambda: time.time_ns() / 1e9
