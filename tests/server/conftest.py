import logging

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Compiled programs of all tests, so that the native loop is compiled once."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def notes():
    """Gives what the audit log is told of an event meanwhile."""
    kept = []

    class Keeper(logging.Handler):
        def emit(self, record):
            kept.append(record)

    logger, keeper = logging.getLogger("wsgrad.audit"), Keeper()
    level = logger.level
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    yield lambda event: [record.audit for record in kept if record.getMessage() == event]
    logger.removeHandler(keeper)
    logger.setLevel(level)
