"""Compare the bytes of loaded KV cache blocks with those that were computed for the same tokens, by samples."""
