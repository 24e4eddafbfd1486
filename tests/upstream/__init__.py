"""vLLM's own tests of connectors, with kvobs's classes in the place of vLLM's; see ``docs/upstream-tests.md``."""
