"""One module a target: `seeds()` makes its corpus, and `check(data)` tries one input and raises on a finding."""
