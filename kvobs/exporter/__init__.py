"""The exporter, a process beside an engine, which serves kvobs's metrics and exports its spans without vLLM."""
