"""Count lookups, loads and saves, what loads gain, and how far back prompts were used last."""
