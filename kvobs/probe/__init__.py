"""Time and count the calls into connectors, in C or in Python, and show the one in progress."""
