import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Compiled programs of all tests, so that the native loop is compiled once."""
    return tmp_path_factory.mktemp("programs")
