"""Route between the connectors: who loads a request, who saves it, what travels between scheduler and workers."""
