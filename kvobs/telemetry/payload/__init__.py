"""The numbers on their way: the form on the wire, merging, rebuilding."""
