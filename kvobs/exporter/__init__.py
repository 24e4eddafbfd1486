"""The exporter, a process of its own beside an engine: it serves kvobs's metrics and exports its spans without vLLM."""
