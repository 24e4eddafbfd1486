"""Time and count the calls into connectors, and show the one in progress: the way of a call."""
