"""Record what happens in EngineCore and in the workers: counts, span records, the last calls."""
