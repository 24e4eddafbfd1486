"""vLLM's side of the connector interface: its hooks, the versions that differ, the deviations from its router."""
