"""Record what happens in EngineCore and in the workers: counts, span records and calls in progress."""
