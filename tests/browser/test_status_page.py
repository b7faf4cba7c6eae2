"""The status page as a person meets it, from a real server; `fake` stands where a test needs certain figures."""

import copy
import json

import pytest
from page_driver import PHONE, driven_chromium, new_page, until, watched
from server_process import running_server

CLIENT, NODE, ADMIN = "client-token-of-the-test", "node-token-of-the-test", "admin-token-of-the-test"
QR = "data:image/svg+xml;charset=utf-8,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E"


@pytest.fixture(scope="module")
def driven(chromium_command):
    with driven_chromium(chromium_command) as browser:
        yield browser


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    variables = {"WSGRAD_TOKEN": CLIENT, "WSGRAD_NODE_TOKEN": NODE, "WSGRAD_ADMIN_TOKEN": ADMIN}
    arguments = ("--device", "cpu", "--name", "box")
    with running_server(tmp_path_factory.mktemp("server"), *arguments, variables=variables) as server:
        yield f"http://127.0.0.1:{server.ready['port']}"
        server.stop()


@pytest.fixture
def context(driven):
    context = driven.new_context(viewport={"width": 1100, "height": 800}, reduced_motion="reduce")
    yield context
    context.close()


@pytest.fixture
def page(context):
    return new_page(context)


def totals(**values):
    zero = dict.fromkeys(
        ("memory", "buffers", "programs", "launches", "bytes_in", "bytes_out", "errors", "sessions"), 0
    )
    return zero | values


class FakeStatus:
    """Answers for `/status.json` and `/admin/…` in the server's place: one document after the other."""

    def __init__(self, page):
        device = {"id": "ada/browser/0", "label": "<b>Ada</b>", "node": "ada", "kind": "browser", "dialects": ["wgsl"]}
        self.document = {
            "server": "wsgrad 0",
            "name": "fake-box",
            "pid": 1,
            "uptime_seconds": 100.0,
            "time": 1_700_000_000.0,
            "role": "admin",
            "page_url": "https://192.0.2.1:7667/",
            "join_url": f"https://192.0.2.1:7667/#token={NODE}",
            "qr": QR,
            "devices": [device | {"adapter": "Fake GPU", "memory": 1 << 30, "totals": totals()}],
            "nodes": [
                {"name": "ada", "label": "<b>Ada</b>", "paused": False, "agent": "a browser", "peer": "192.0.2.7:1"}
            ],
            "sessions": [],
            "totals": totals(),
            "errors": [],
        }
        self.script = []
        self.posts = []
        self.answer = (200, "application/json", json.dumps({}))
        self.failing = 0
        page.route("**/status.json", self._status)
        page.route("**/admin/**", self._admin)

    def after(self, seconds, **changes):
        """Let the next document be this one, changed, so many seconds later."""
        document = copy.deepcopy(self.script[-1] if self.script else self.document)
        document["time"] += seconds
        document["uptime_seconds"] += seconds
        self.script.append(document | changes)

    def _status(self, route):
        if self.failing:
            self.failing -= 1
            route.abort()
            return
        shown = self.document
        if self.script:
            self.document = self.script.pop(0)
        route.fulfill(json=shown)

    def _admin(self, route):
        request = route.request
        self.posts.append(
            (request.url.partition("/admin/")[2], request.post_data_json, request.headers["authorization"])
        )
        status, kind, body = self.answer
        route.fulfill(status=status, content_type=kind, body=body)


@pytest.fixture
def fake(page):
    return FakeStatus(page)


def opened(page, origin, token=ADMIN):
    page.goto(f"{origin}/status#token={token}")
    page.get_by_role("heading", name="Devices").wait_for()


@pytest.mark.parametrize("token", [CLIENT, ADMIN])
def test_a_real_server_is_shown_for_either_token(page, origin, token):
    problems = watched(page)
    opened(page, origin, token)
    assert page.url == f"{origin}/status"
    page.get_by_role("heading", name="box", exact=True).wait_for()
    page.get_by_role("rowheader", name="box/cpu/0").wait_for()
    page.get_by_text("This machine").wait_for()
    until(page, "document.querySelectorAll('#plot-launches .line')[0].getAttribute('d') !== ''")
    page.reload()
    page.get_by_role("rowheader", name="box/cpu/0").wait_for()
    assert problems == []


def test_a_wrong_token_is_asked_for_again(page, origin):
    page.goto(f"{origin}/status")
    page.get_by_role("textbox", name="Client or admin token").fill("not-the-token")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("The server did not take this token: the token is wrong.").wait_for()
    page.get_by_role("textbox", name="Client or admin token").fill(f"{origin}/#token={CLIENT}")
    page.keyboard.press("Enter")
    page.get_by_role("rowheader", name="box/cpu/0").wait_for()
    page.get_by_role("button", name="Forget the token").click()
    page.get_by_role("textbox", name="Client or admin token").wait_for()
    assert page.evaluate("JSON.stringify(sessionStorage)") == "{}"
    assert not page.get_by_role("heading", name="Devices").is_visible()


def test_the_node_token_shows_nothing(page, origin):
    page.goto(f"{origin}/status#token={NODE}")
    page.get_by_role("alert").get_by_text("this route needs the admin or client token").wait_for()


def test_counters_become_rates(page, origin, fake):
    [device] = fake.document["devices"]
    fake.after(
        2.0,
        totals=totals(launches=500, bytes_in=2 << 20, memory=3 << 20),
        devices=[device | {"totals": totals(launches=100, memory=3 << 20, sessions=1)}],
        sessions=[
            {"session": 4, "client": "Grace", "seconds": 7, "devices": ["ada/browser/0"], "totals": totals(launches=40)}
        ],
    )
    opened(page, origin)
    until(page, "document.querySelector('#plot-launches .figure').textContent === '250/s'")
    assert page.locator("#plot-bytes .figure").all_inner_texts() == ["1\u00a0MiB/s", "0\u00a0B/s"]
    row = page.get_by_role("row").filter(has_text="ada/browser/0").inner_text().split("\t")
    assert row[1:4] == ["browser, Fake GPU", "3\u00a0MiB of 1\u00a0GiB", "50"]
    row = page.get_by_role("row").filter(has_text="Grace").inner_text().split("\t")
    # It came between two answers: all that it has done happened since the first.
    assert row == ["Grace", "<b>Ada</b>", "0\u00a0B", "20", "7\u00a0s"]


def test_one_device_can_be_looked_at(page, origin, fake):
    [device] = fake.document["devices"]
    fake.after(1.0, totals=totals(launches=900), devices=[device | {"totals": totals(launches=30)}])
    opened(page, origin)
    until(page, "document.querySelector('#plot-launches .figure').textContent === '900/s'")
    page.get_by_label("Show").select_option("<b>Ada</b>")
    assert page.locator("#plot-launches .figure").inner_text() == "30/s"


def test_a_restarted_server_begins_anew(page, origin, fake):
    fake.document["totals"]["launches"] = 10_000
    fake.after(1.0, pid=2, uptime_seconds=0.5, totals=totals(launches=3))
    fake.after(1.0, totals=totals(launches=13))
    opened(page, origin)
    until(page, "document.querySelector('#plot-launches .figure').textContent === '10/s'")


def test_everything_is_text(page, origin, fake):
    fake.document["errors"] = [
        {
            "time": 1,
            "device": "ada/browser/0",
            "session": 3,
            "code": "CompileError",
            "message": "<script>alert(1)</script>",
        }
    ]
    fake.document["sessions"] = [
        {"session": 3, "client": "<img src=x>", "seconds": 1, "devices": [], "connected": False, "totals": totals()}
    ]
    opened(page, origin)
    page.get_by_role("heading", name="<b>Ada</b>").wait_for()
    page.get_by_role("rowheader", name="<img src=x> (away; may come back)").wait_for()
    page.get_by_text("A program that was sent here does not compile.").wait_for()
    assert page.locator("#errors pre").text_content() == "CompileError: <script>alert(1)</script>"
    assert page.locator("main b, main script, #sessions img").count() == 0


def test_open_details_and_focus_survive_the_next_answer(page, origin, fake):
    error = {"time": 1, "device": "ada/browser/0", "session": 3, "code": "Timeout", "message": "slow"}
    fake.document["errors"] = [error]
    fake.after(1.0, errors=[error, error | {"time": 2, "message": "again"}])
    opened(page, origin)
    page.locator("#errors summary").first.click()
    page.get_by_role("button", name="Rename").focus()
    until(page, "document.querySelectorAll('#errors > li').length === 2")
    assert page.locator("#errors details[open]").count() == 1
    assert page.evaluate("document.activeElement.dataset.action") == "rename"


def test_only_the_admin_token_brings_buttons_and_the_code(page, origin, fake):
    del fake.document["join_url"], fake.document["qr"]
    fake.document["role"] = "client"
    opened(page, origin, CLIENT)
    assert page.locator("[data-action]").count() == 0
    assert not page.get_by_role("button", name="New tokens").is_visible()
    assert not page.locator("#qr").is_visible()
    assert page.locator("#page-url").inner_text() == "https://192.0.2.1:7667/"


def test_the_code_is_an_image(page, origin, fake):
    opened(page, origin)
    assert page.get_by_role("img", name="QR code").get_attribute("src") == QR
    fake.after(1.0, qr="https://elsewhere.test/track.svg")
    until(page, "document.querySelector('#qr').hidden")


def test_an_action_is_asked_for_again_and_then_done(page, origin, fake):
    opened(page, origin)
    page.get_by_role("button", name="Remove <b>Ada</b>").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("heading", name="Remove “<b>Ada</b>”?").wait_for()
    assert page.evaluate("document.activeElement.id") == "dialog-no"
    page.keyboard.press("Escape")
    assert fake.posts == []
    page.get_by_role("button", name="Remove <b>Ada</b>").click()
    dialog.get_by_role("button", name="Remove").click()
    page.locator("#announce").get_by_text("was removed").wait_for(state="attached")
    assert fake.posts == [("nodes/ada/kick", {}, f"Bearer {ADMIN}")]


def test_renaming_edits_the_present_name(page, origin, fake):
    opened(page, origin)
    page.get_by_role("button", name="Rename").click()
    field = page.get_by_role("textbox", name="New name")
    assert field.input_value() == "<b>Ada</b>"
    field.fill("Lab 3")
    page.keyboard.press("Enter")
    page.locator("#announce").get_by_text("was renamed").wait_for(state="attached")
    assert fake.posts == [("nodes/ada/rename", {"label": "Lab 3"}, f"Bearer {ADMIN}")]


def test_a_paused_node_can_be_resumed(page, origin, fake):
    [node] = fake.document["nodes"]
    fake.after(1.0, nodes=[node | {"paused": True}])
    opened(page, origin)
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    page.locator("#announce").get_by_text("works again").wait_for(state="attached")
    assert [route for route, *_ in fake.posts] == ["nodes/ada/resume"]


def test_what_the_server_refuses_is_shown(page, origin, fake):
    fake.answer = (409, "text/plain", "it has just left")
    opened(page, origin)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_text("it has just left").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="OK").click()
    assert not page.get_by_role("dialog").is_visible()


def test_new_tokens_are_shown_once(page, origin, fake):
    answer = {"client": "new-client-token", "node": "new-node-token", "admin": ADMIN}
    fake.answer = (200, "application/json", json.dumps(answer))
    opened(page, origin)
    page.get_by_role("button", name="New tokens").click()
    page.get_by_role("dialog").get_by_role("button", name="Make new tokens").click()
    page.get_by_text("new-node-token").wait_for()
    assert fake.posts == [("tokens/rotate", {}, f"Bearer {ADMIN}")]
    page.get_by_role("button", name="I have kept them").click()
    assert "new-node-token" not in page.content()
    assert ADMIN not in page.content()


def test_a_server_that_does_not_answer_is_asked_again_and_again(page, origin, fake):
    opened(page, origin)
    fake.failing = 2
    page.get_by_role("heading", name="The server does not answer.").wait_for()
    assert "What is shown is from" in page.locator("#detail").inner_text()
    assert page.get_by_role("heading", name="Devices").is_visible()
    page.get_by_role("heading", name="fake-box").wait_for()


@pytest.mark.parametrize("width", [320, PHONE["width"], 768, 1280])
def test_nothing_is_cut_off_at_any_width(page, origin, fake, width):
    [device], [node] = fake.document["devices"], fake.document["nodes"]
    name = "a-name-of-as-many-letters-as-there-may-be"
    fake.document["devices"] = [device | {"id": f"{name}/browser/0", "label": "W" * 60, "adapter": "x" * 90}]
    fake.document["nodes"] = [node | {"label": "W" * 60, "agent": "Mozilla/5.0 " + "y" * 60}]
    fake.document["sessions"] = [
        {"session": 1, "client": "z" * 80, "seconds": 1e6, "devices": [f"{name}/browser/0"], "totals": totals()}
    ]
    page.set_viewport_size({"width": width, "height": 800})
    opened(page, origin)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
