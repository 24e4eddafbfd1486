"""Sum up what a run got from its connectors, from its numbers before and after: ``kvobs summary``."""
