"""Both pages with a real server and a real node in Chromium: consent, work, errors, and an administrator's hand."""

from pathlib import Path

import numpy as np
import pytest
from joined import ADMIN_TOKEN, CLIENT_TOKEN, NODE_TOKEN, serving
from page_driver import driven_chromium, new_page, until, watched

import wsgrad

INDEX = Path(__file__).parent.parent.parent / "browser" / "index.html"
DOUBLE = """
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(64) fn double(@builtin(global_invocation_id) id: vec3u) { x[id.x] *= 2; }
"""


@pytest.fixture(scope="module")
def driven(chromium_command):
    with driven_chromium(chromium_command) as browser:
        yield browser


@pytest.fixture
def context(driven):
    context = driven.new_context(viewport={"width": 1100, "height": 900}, reduced_motion="reduce")
    yield context
    context.close()


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path, "--device", "none") as server:
        yield server
        server.stop()


@pytest.fixture
def address(server):
    return f"127.0.0.1:{server.ready['port']}"


@pytest.fixture
def client(address):
    with wsgrad.connect(f"ws://{address}#token={CLIENT_TOKEN}") as client:
        yield client


def join(page, name="Ada's tab"):
    page.get_by_label("Name of this device").fill(name)
    page.get_by_role("button", name="Allow and join").click()
    page.get_by_role("heading", name="Lending this GPU to").wait_for()


def double(device, count=256):
    x = device.array(np.arange(count, dtype=np.float32))
    device.program(DOUBLE, "double")(x, grid=count // 64)
    return x


def test_a_served_page_works_for_a_client_and_shows_it(context, address, client):
    page = new_page(context)
    problems = watched(page)
    page.goto(f"http://{address}/#token={NODE_TOKEN}")
    join(page)
    device = client.wait_for_device("browser", timeout=20)
    assert (device.id, device.label) == ("ada-s-tab/browser/0", "Ada's tab")
    assert page.locator("#device-id").inner_text() == device.id
    assert "works in a worker" in page.locator("#connection").inner_text()
    x = double(device)
    assert np.array_equal(x.numpy(), 2 * np.arange(256, dtype=np.float32))
    page.get_by_text("1 client uses it now").wait_for()
    until(page, "parseInt(document.querySelector('#users td:nth-child(3)').textContent) >= 1")
    until(page, "document.querySelector('#memory-used').textContent !== '0\\u00a0B'")
    with pytest.raises(wsgrad.CompileError):
        device.program("@compute @workgroup_size(1) fn bad() { let x = y; }", "bad").ready(timeout=20)
    page.get_by_text("A program that was sent here does not compile.").wait_for()
    assert problems == []


def test_a_page_from_a_file_asks_for_the_server_and_remembers_it(context, address, client):
    page = new_page(context)
    problems = watched(page)
    page.goto(INDEX.as_uri())
    page.get_by_role("textbox", name="Server").fill("ftp://x")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("is no address of a server").wait_for()
    page.get_by_role("textbox", name="Server").fill("gpu-box:6667")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("Browsers open no connection to port 6667").wait_for()
    page.get_by_role("textbox", name="Server").fill(address)
    page.get_by_role("textbox", name="Node token").fill(NODE_TOKEN)
    page.keyboard.press("Enter")
    join(page, "file tab")
    assert "works on this page" in page.locator("#connection").inner_text()
    device = client.wait_for_device("file tab", timeout=20)
    x = double(device)
    assert np.array_equal(x.numpy(), 2 * np.arange(256, dtype=np.float32))
    page.close(run_before_unload=False)
    again = new_page(context)
    again.goto(INDEX.as_uri())
    again.get_by_role("heading", name="Lending this GPU to").wait_for()
    assert client.wait_for_device("file tab", timeout=20) is device
    with pytest.raises(wsgrad.DeviceLost):
        x.numpy()  # what it held went with the first page
    device.reopen()
    assert np.array_equal(double(device).numpy(), 2 * np.arange(256, dtype=np.float32))
    assert problems == []


def test_a_wrong_token_is_told_and_a_right_one_joins(context, address, client):
    page = new_page(context)
    page.goto(f"http://{address}/#token=not-the-token")
    page.get_by_role("button", name="Allow and join").click()
    page.get_by_role("heading", name="did not let this tab in").wait_for()
    page.get_by_role("textbox", name="Node token").fill(NODE_TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Lending this GPU to").wait_for()
    client.wait_for_device("browser", timeout=20)


def test_a_tab_that_comes_back_without_a_token_is_known(context, address, client):
    page = new_page(context)
    page.goto(f"http://{address}/#token={NODE_TOKEN}")
    join(page)
    identity = client.wait_for_device("browser", timeout=20).id
    page.close(run_before_unload=False)
    again = new_page(context)  # a new tab: it has no token of its own
    again.goto(f"http://{address}/")
    again.get_by_role("heading", name="Lending this GPU to").wait_for()
    assert client.wait_for_device("browser", timeout=20).id == identity


def test_pausing_refuses_new_work_until_it_is_resumed(context, address, client):
    page = new_page(context)
    page.goto(f"http://{address}/#token={NODE_TOKEN}")
    join(page)
    device = client.wait_for_device("browser", timeout=20)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("heading", name="Paused: no work runs here.").wait_for()
    with pytest.raises(wsgrad.DeviceError, match="is paused by its owner"):
        double(device).numpy()
    page.get_by_role("button", name="Resume").click()
    assert np.array_equal(
        double(client.wait_for_device("browser", timeout=20)).numpy(), 2 * np.arange(256, dtype=np.float32)
    )


def test_an_administrator_renames_pauses_and_removes_a_tab(context, address, client):
    page = new_page(context)
    page.goto(f"http://{address}/#token={NODE_TOKEN}")
    join(page)
    client.wait_for_device("browser", timeout=20)
    status = new_page(context)
    problems = watched(status)
    status.goto(f"http://{address}/status#token={ADMIN_TOKEN}")
    status.get_by_role("button", name="Rename Ada's tab").click()
    status.get_by_role("textbox", name="New name").fill("Lab 3")
    status.keyboard.press("Enter")
    page.get_by_text("An administrator of the server named this device “Lab 3”.").wait_for()
    status.get_by_role("button", name="Pause Lab 3").click()
    status.get_by_role("dialog").get_by_role("button", name="Pause").click()
    page.get_by_role("heading", name="Paused").wait_for()
    status.get_by_role("button", name="Resume Lab 3").click()
    status.get_by_role("dialog").get_by_role("button", name="Resume").click()
    page.get_by_role("heading", name="Lending this GPU to").wait_for()
    status.get_by_role("button", name="Remove Lab 3").click()
    status.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("heading", name="An administrator removed this tab").wait_for()
    status.get_by_text("None yet.").wait_for()
    page.get_by_role("button", name="Join again").click()
    status.get_by_role("heading", name="Lab 3").wait_for()
    assert problems == []


def test_a_revoked_tab_is_out_and_the_new_token_is_shown(context, address):
    page = new_page(context)
    page.goto(f"http://{address}/#token={NODE_TOKEN}")
    join(page)
    status = new_page(context)
    status.goto(f"http://{address}/status#token={ADMIN_TOKEN}")
    status.get_by_role("button", name="Revoke Ada's tab").click()
    status.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("heading", name="did not let this tab in").wait_for()
    token = status.locator("#fresh-tokens code").inner_text()
    assert token != NODE_TOKEN
    page.get_by_role("textbox", name="Node token").fill(token)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Lending this GPU to").wait_for()
