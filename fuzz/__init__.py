"""Coverage-guided fuzzing of what a stranger's bytes reach; run by hand, not by the tests."""
