"""List vLLM's hooks, the differences between its versions, and those to its router."""
