"""The browsers of these tests really have a WebGPU adapter, where a tab of theirs would look for it."""

import pytest
from remote import RemoteError

ADAPTER = "(async () => { const a = await navigator.gpu.requestAdapter(); return a && a.limits.maxBufferSize; })()"


@pytest.fixture
def tab(browser, page_files):
    tab = browser.open(page_files.scripts("cbor"))
    yield tab
    tab.close()


def test_a_page_has_an_adapter(tab):
    assert tab.evaluate(ADAPTER) >= 1 << 28


def test_a_worker_has_an_adapter(tab):
    assert tab.evaluate(f"inWorker({ADAPTER!r})") >= 1 << 28


def test_a_page_from_a_file_has_an_adapter(browser, page_files):
    tab = browser.open(page_files.scripts("cbor", file=True))
    try:
        assert tab.evaluate("ready.then(() => [origin, typeof cbor])") == ["null", "object"]
        assert tab.evaluate(ADAPTER) >= 1 << 28
    finally:
        tab.close()


def test_scripts_load_in_page_and_worker(tab):
    assert tab.evaluate("ready.then(() => typeof cbor.decode)") == "function"
    assert tab.evaluate("inWorker('typeof cbor.decode')") == "function"


def test_what_a_script_throws_reaches_the_test(tab):
    with pytest.raises(RemoteError, match="what went wrong"):
        tab.evaluate("Promise.reject(new Error('what went wrong'))")
    with pytest.raises(RemoteError, match="what went wrong"):
        tab.evaluate("inWorker('Promise.reject(new Error(\"what went wrong\"))')")


def test_the_console_is_kept(tab):
    tab.evaluate("console.log('seen', 7)")
    tab.evaluate("1")
    assert any("seen" in line for line in tab.console)
