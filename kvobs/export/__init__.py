"""Turn pages into metrics, spans and a status page: in the API server, or in a process without vLLM."""
