"""Being rewritten."""
