"""Show slow and failed loads as waterfalls, from the spans in the pages of this host: ``kvobs trace``."""
