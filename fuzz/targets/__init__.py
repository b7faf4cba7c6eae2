"""One module a target: `seeds()` makes its corpus, `check(data)` raises on a finding, `MAX_NBYTES` bounds an input."""
