"""wsgrad."""
