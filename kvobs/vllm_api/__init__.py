"""List vLLM's hooks and the differences between its versions."""
