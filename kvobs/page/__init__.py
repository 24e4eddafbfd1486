"""Hold everything that a process counts and notes in one piece of shared memory, which others read: its page.

A process writes with plain stores, under its GIL, and never waits. Whoever serves the numbers reads them: also while
the GIL is held, and after the process is gone. Times are ns of the monotonic clock, which all processes of a machine
share.
"""
