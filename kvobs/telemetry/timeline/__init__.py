"""Keep the latest calls in a ring of shared memory."""
