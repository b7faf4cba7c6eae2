"""One real server process for most client tests, and a session of its own for each test that asks for one."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

import wsgrad
from wsgrad.client.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def real_server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(timeout=60)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def url(real_server: EmbeddedServer) -> str:
    return real_server.url


@pytest.fixture
def server(url: str) -> Iterator[wsgrad.Server]:
    with wsgrad.connect(url) as server:
        yield server


@pytest.fixture
def device(server: wsgrad.Server) -> wsgrad.Device:
    return server.devices["cpu"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("WSGRAD_URL", "WSGRAD_TOKEN", "WSGRAD_DEBUG"):
            monkeypatch.delenv(name)
