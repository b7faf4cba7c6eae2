"""The tab's page as a person meets it, from a real server; a fake worker (named as such) reports what a node would."""

import re
from pathlib import Path

import pytest
from page_driver import FOREIGN_HOST, PHONE, FakeNode, driven_chromium, new_page, until, watched
from server_process import running_server

BROWSER = Path(__file__).parent.parent.parent / "browser"
TOKEN = "node-token-of-the-test"


@pytest.fixture(scope="module")
def driven(chromium_command):
    with driven_chromium(chromium_command) as browser:
        yield browser


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A real server, for its pages and their security policy."""
    variables = {"WSGRAD_NODE_TOKEN": TOKEN}
    with running_server(tmp_path_factory.mktemp("server"), "--device", "none", variables=variables) as server:
        yield f"http://127.0.0.1:{server.ready['port']}"
        server.stop()


@pytest.fixture
def context(driven):
    context = driven.new_context(viewport={"width": 1000, "height": 800}, reduced_motion="reduce")
    yield context
    context.close()


@pytest.fixture
def page(context):
    """A page that must not log any error, nor break its content security policy."""
    page = new_page(context)
    problems = watched(page)
    yield page
    assert problems == []


@pytest.fixture
def node(page):
    return FakeNode(page)


def joined(page, node, origin, **state):
    """Come to a page that a person has allowed and whose node has joined."""
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("button", name="Allow and join").click()
    node.commands("start")
    node.state("joined", **({"name": "ada", "secret": "its secret", "message": ""} | state))
    page.get_by_role("heading", name="Lending this GPU to").wait_for()


def test_it_asks_before_it_first_works_for_a_server(page, node, origin):
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("heading", name=f"Lend this GPU to {origin.removeprefix('http://')}?").wait_for()
    assert "Fake GPU 3000" in page.locator("#consent").inner_text()
    assert page.evaluate("window.commands") == []
    page.get_by_label("Name of this device").fill("Ada's phone")
    page.get_by_label("GPU memory it may use").fill("3")
    page.get_by_role("button", name="Allow and join").click()
    [start] = node.commands("start")
    assert start["url"] == origin.replace("http", "ws")
    assert (start["token"], start["name"], start["label"]) == (TOKEN, "Ada's phone", "Ada's phone")
    assert (start["secret"], start["memory"]) == (None, 512 << 20)


def test_no_means_that_nothing_is_sent(page, node, origin):
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("button", name="Not now").click()
    page.get_by_role("heading", name="This tab has not joined").wait_for()
    page.reload()
    page.get_by_role("button", name="Join again").click()
    page.get_by_role("button", name="Allow and join").wait_for()
    assert page.evaluate("window.commands") == []


def test_the_token_leaves_the_address_and_survives_a_reload(page, node, origin):
    joined(page, node, origin)
    assert page.url == f"{origin}/"
    page.reload()
    [start] = node.commands("start")
    assert (start["token"], start["name"], start["secret"]) == (TOKEN, "ada", "its secret")


def test_a_new_token_in_the_address_of_an_open_page_is_used(page, node, origin):
    joined(page, node, origin)
    page.evaluate("location.hash = '#token=another-token'")
    until(page, "window.commands.some((c) => c.do === 'start' && c.token === 'another-token')")
    assert page.url == f"{origin}/"


def test_two_tabs_of_a_browser_are_two_devices(page, context, node, origin):
    joined(page, node, origin)
    second = new_page(context)
    other = FakeNode(second)
    second.goto(f"{origin}/#token={TOKEN}")
    [start] = other.commands("start")
    assert start["secret"] is None
    second.close()
    page.reload()
    [start] = node.commands("start")
    assert start["secret"] == "its secret"


def test_it_shows_the_device_and_inserts_all_of_it_as_text(page, node, origin):
    joined(page, node, origin)
    assert page.locator("#adapter").inner_text() == "Fake GPU 3000 <b>bold</b>"
    assert page.locator("#features .chip").all_inner_texts() == ["16-bit floats", "timestamps", "graphs"]
    page.get_by_text("All features and limits").click()
    assert page.locator("#all-features .chip").all_inner_texts() == ["shader-f16", "timestamp-query"]
    limits = re.sub(r"\s+", " ", page.locator("#limits").inner_text())
    assert "max buffer size 1 GiB" in limits
    assert "max compute workgroup size x 1,024" in limits
    assert page.locator("#device-id").inner_text() == "ada/browser/0"
    node.stats(
        1, sessions=[{"session": 1, "client": "<img src=x onerror=alert(1)>", "memory": 0, "launches": 0, "seconds": 0}]
    )
    page.get_by_role("rowheader", name="<img src=x").wait_for()
    node.report(event="error", at=1, code="CompileError", message="1:1: <script>alert(1)</script>")
    page.locator("#errors summary").click()
    assert "<script>" in page.locator("#errors pre").inner_text()
    assert page.locator("main img, main script, main b").count() == 0


def test_figures_rates_and_who_uses_it(page, node, origin):
    joined(page, node, origin)
    session = {"session": 7, "client": "notebook of Grace", "memory": 1 << 20, "launches": 12_345, "seconds": 61}
    node.stats(10.0, launches=100, bytesIn=0, bytesOut=0)
    node.stats(12.0, launches=300, bytesIn=4 << 20, bytesOut=1 << 20, memory=256 << 20, sessions=[session])
    page.get_by_role("heading", name="Launches a second").wait_for()
    until(page, "document.querySelector('#plot-launches .figure').textContent === '100/s'")
    assert page.locator("#plot-bytes .figure").all_inner_texts() == ["2\u00a0MiB/s", "512\u00a0KiB/s"]
    assert page.locator("#memory-used").inner_text() == "256\u00a0MiB"
    assert page.get_by_role("meter").get_attribute("aria-valuenow") == "25"
    assert page.locator("#state-word").inner_text() == "In use"
    row = page.get_by_role("row").filter(has_text="notebook of Grace")
    assert row.inner_text().split("\t") == ["notebook of Grace", "1\u00a0MiB", "12.3\u00a0k", "1\u00a0min"]
    assert "1 client uses it now" in page.locator("#detail").inner_text()
    node.stats(13.0, launches=300)
    page.get_by_text("Nobody at the moment").wait_for()


def test_values_of_the_past_are_read_with_the_arrow_keys(page, node, origin):
    joined(page, node, origin)
    for second in range(5):
        node.stats(float(second), launches=second * second)
    until(page, "document.querySelector('#plot-launches .figure').textContent === '7/s'")
    plot = page.locator("#plot-launches svg")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#plot-launches .figure").inner_text() == "3/s"
    assert "2 seconds ago: launches 3/s" in plot.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert page.locator("#plot-launches .figure").inner_text() == "7/s"


def test_errors_are_told_in_plain_words_and_repeats_are_counted(page, node, origin):
    joined(page, node, origin)
    page.get_by_text("None so far").wait_for()
    for _ in range(3):
        node.report(event="error", at=1_700_000_000, code="OutOfMemory", message="no room for 5 GiB")
    page.get_by_text("A program wanted more memory than this device has left").wait_for()
    page.get_by_text("(3 times)").wait_for()
    assert page.locator("#errors > li").count() == 1
    for number in range(30):
        node.report(event="error", at=1_700_000_000, code="LaunchError", message=f"launch {number}")
    page.get_by_text("launch 29").wait_for(state="attached")
    assert page.locator("#errors > li").count() == 20


def test_name_and_memory_are_settable_and_remembered(page, node, origin):
    joined(page, node, origin)
    page.get_by_label("Name", exact=True).fill("Box of Ada")
    page.keyboard.press("Enter")
    assert node.commands("label") == [{"do": "label", "label": "Box of Ada"}]
    page.get_by_label("Allow up to").fill("5")
    assert node.commands("memory") == [{"do": "memory", "bytes": 2 << 30}]
    page.reload()
    [start] = node.commands("start")
    assert (start["label"], start["memory"]) == ("Box of Ada", 2 << 30)


def test_an_empty_name_changes_nothing(page, node, origin):
    joined(page, node, origin)
    before = page.get_by_label("Name", exact=True).input_value()
    page.get_by_label("Name", exact=True).fill("  ")
    page.get_by_role("button", name="Rename").click()
    assert page.get_by_label("Name", exact=True).input_value() == before
    assert [command["do"] for command in page.evaluate("window.commands")] == ["start"]


def test_pause_and_resume(page, node, origin):
    joined(page, node, origin)
    page.get_by_role("button", name="Pause").click()
    node.commands("pause")
    node.state("paused", message="")
    page.get_by_role("heading", name="Paused: no work runs here.").wait_for()
    page.reload()
    until(page, "window.commands.map((c) => c.do).join() === 'start,pause'")
    node.state("paused", message="")
    page.get_by_role("button", name="Resume").click()
    node.commands("resume")
    node.state("joined", name="ada", secret="its secret")
    page.get_by_role("button", name="Pause").wait_for()


def test_leaving_asks_only_where_somebody_uses_it_and_lasts(page, node, origin):
    joined(page, node, origin)
    session = {"session": 1, "client": "c", "memory": 0, "launches": 0, "seconds": 0}
    node.stats(1, sessions=[session])
    page.get_by_text("1 client uses it now").wait_for()
    page.get_by_role("button", name="Leave").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cancel").click()
    assert all(command["do"] != "leave" for command in page.evaluate("window.commands"))
    page.get_by_role("button", name="Leave").click()
    dialog.get_by_role("button", name="Leave").click()
    node.commands("leave")
    node.state("left", message="")
    page.get_by_role("heading", name="You have left").wait_for()
    page.reload()
    page.get_by_role("button", name="Join again").click()
    node.commands("start")


def test_who_was_removed_stays_out_until_they_say_so(page, node, origin):
    joined(page, node, origin)
    node.state("kicked", message="removed by an administrator")
    page.get_by_role("heading", name="An administrator removed this tab").wait_for()
    page.reload()
    page.get_by_role("heading", name="An administrator removed this tab").wait_for()
    assert page.evaluate("window.commands") == []
    page.get_by_role("button", name="Join again").click()
    node.commands("start")


def test_a_refused_token_can_be_given_again(page, node, origin):
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("button", name="Allow and join").click()
    node.commands("start")
    node.state("refused", message="token refused or origin not allowed")
    page.get_by_role("heading", name="did not let this tab in").wait_for()
    assert "Tokens change when the server restarts" in page.locator("#detail").inner_text()
    page.get_by_role("textbox", name="Node token").fill("not a token!")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("That is no token").wait_for()
    page.get_by_role("textbox", name="Node token").fill(f"{origin}/#token=the-new-one")
    page.keyboard.press("Enter")
    until(page, "window.commands.filter((c) => c.do === 'start').length === 2")
    assert node.commands("start")[1]["token"] == "the-new-one"


def test_a_lost_server_is_waited_for_and_can_be_tried_at_once(page, node, origin):
    joined(page, node, origin)
    node.state("waiting", message="the server does not answer", retrySeconds=30)
    page.locator("#detail").get_by_text("Trying again by itself in").wait_for()
    assert page.locator("#detail").inner_text().startswith("The server does not answer. Trying")
    page.get_by_role("button", name="Try now").click()
    until(page, "window.commands.filter((c) => c.do === 'start').length === 2")


def test_an_administrators_new_name_is_shown(page, node, origin):
    joined(page, node, origin)
    node.report(event="present", label="Lab 3, seat 4", paused=False, memory=0)
    page.get_by_text("An administrator of the server named this device “Lab 3, seat 4”.").wait_for()
    assert page.get_by_label("Name", exact=True).input_value() == "Lab 3, seat 4"


def test_an_administrators_new_name_stays_over_a_reload_and_with_this_tab(page, context, node, origin):
    joined(page, node, origin)
    mine = page.get_by_label("Name", exact=True).input_value()
    node.report(event="present", label="Lab 3, seat 4", paused=False, memory=0)
    page.get_by_text("An administrator of the server named this device").wait_for()
    second = new_page(context)
    other = FakeNode(second)
    second.goto(f"{origin}/#token={TOKEN}")
    assert [start["label"] for start in other.commands("start")] == [mine]
    second.close()
    page.reload()
    assert [start["label"] for start in node.commands("start")] == ["Lab 3, seat 4"]


def test_a_software_adapter_is_said_plainly(page, node, origin):
    joined(page, node, origin)
    node.report(event="adapter", device={}, adapterName="SwiftShader", features=[], limits={}, software=True)
    page.get_by_text("This is a software adapter.").wait_for()
    assert "graphics acceleration" in page.locator("#notes").inner_text()


def test_a_forgotten_server_is_asked_about_again(page, node, origin):
    joined(page, node, origin)
    page.get_by_role("button", name="Forget this server").click()
    page.get_by_role("dialog").get_by_role("button", name="Forget").click()
    node.commands("leave")
    node.state("left", message="")
    page.goto("about:blank")
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("button", name="Allow and join").click()
    [start] = node.commands("start")
    assert start["secret"] is None


def test_without_a_token_it_says_where_one_is(page, node, origin):
    page.goto(origin)
    page.get_by_role("heading", name=re.compile("This page needs the server.s node token")).wait_for()
    assert not page.locator("#server-field").is_visible()
    page.get_by_role("textbox", name="Node token").fill(TOKEN)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Allow and join").wait_for()


@pytest.mark.parametrize(
    ("reason", "headline", "todo"),
    [
        ("no-webgpu", "This browser has no WebGPU.", "Safari 26"),
        ("no-adapter", "The browser found no GPU that it will use.", "graphics acceleration"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(page, node, origin, reason, headline, todo):
    # The page itself has WebGPU here, and would go on without the worker that says otherwise.
    page.add_init_script("delete Navigator.prototype.gpu")
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("button", name="Allow and join").wait_for()
    node.report(event="unsupported", reason=reason, message="")
    page.get_by_role("heading", name=headline).wait_for()
    assert todo in page.locator("#todo").inner_text()
    assert page.get_by_role("button", name="Try again").is_visible()


def test_http_from_another_host_is_told_to_use_https(context, tmp_path):
    variables = {"WSGRAD_NODE_TOKEN": TOKEN}
    with running_server(tmp_path, "--device", "none", "--allow-host", FOREIGN_HOST, variables=variables) as server:
        port = server.ready["port"]
        page = new_page(context)
        page.goto(f"http://{FOREIGN_HOST}:{port}/#token={TOKEN}")
        page.get_by_role("heading", name="This page was opened without https.").wait_for()
        assert "wsgrad-serve --host 0.0.0.0 --tls" in page.locator("#todo").inner_text()
        assert page.get_by_role("link", name=f"https://{FOREIGN_HOST}:{port}/").is_visible()
        assert TOKEN not in page.url
        server.stop()


def test_a_missing_script_is_named(context, origin):
    page = new_page(context)
    page.route("**/worker.js", lambda route: route.fulfill(status=404, body=""))
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("heading", name="A part of this page is missing.").wait_for()


def test_it_needs_no_mouse(page, node, origin):
    page.goto(f"{origin}/#token={TOKEN}")
    page.get_by_role("button", name="Allow and join").wait_for()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    for wanted in ("first-name", "first-memory", "Allow and join", "not-now"):
        assert wanted in reached
    page.get_by_role("button", name="Allow and join").press("Enter")
    node.commands("start")
    node.state("joined", name="ada", secret="its secret")
    page.get_by_role("heading", name="Lending this GPU to").wait_for()
    # The button that had the focus is gone: the keyboard goes on at the state.
    assert page.evaluate("document.activeElement.id") == "headline"
    assert "Ready. Lending this GPU" in page.locator("#announce").inner_text()


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_is_cut_off_at_any_width(page, node, origin, width):
    page.set_viewport_size({"width": width, "height": 700})
    joined(page, node, origin, name="a-very-long-name-of-forty-characters-1234")
    client = "a client with a long name " * 3
    node.stats(1, sessions=[{"session": 1, "client": client, "memory": 9 << 30, "launches": 10**9, "seconds": 10**6}])
    node.report(event="error", at=1, code="DeviceError", message="x" * 200)
    page.locator("#errors summary").click()
    page.get_by_text("All features and limits").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


CONTRAST = """() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith('color(') ? 255 : 1;
    return [...numbers.slice(0, 3).map((n) => n * scale), numbers[3] ?? 1];
  };
  const light = ([r, g, b]) => {
    const part = (v) => (v /= 255, v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest('.hidden-text, noscript')) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push([walker.currentNode.data.trim(), ratio]);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", ["consent", "joined", "paused", "kicked"])
def test_every_text_has_enough_contrast(page, node, origin, scheme, state):
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    if state == "consent":
        page.goto(f"{origin}/#token={TOKEN}")
        page.get_by_role("button", name="Allow and join").wait_for()
    else:
        joined(page, node, origin)
        node.report(event="adapter", device={"f16": True}, adapterName="S", features=[], limits={}, software=True)
        node.report(event="error", at=1, code="DeviceError", message="m")
        node.state(state, name="ada", secret="its secret", message="")
        until(page, f"document.body.dataset.state === {state!r}")
    assert page.evaluate(CONTRAST) == []


def test_every_field_and_button_has_a_name(page, node, origin):
    joined(page, node, origin)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, button, svg, [role]')]
            .filter((e) => !(e.labels?.length || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
                || e.textContent.trim() || e.getAttribute('role') === 'status' || e.getAttribute('role') === 'alert'))
            .map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []


def test_a_phone_gets_the_same(page, node, origin):
    page.set_viewport_size(PHONE)
    joined(page, node, origin)
    small = page.evaluate(
        """() => [...document.querySelectorAll('button, input[type=text], input[type=range]')]
            .filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 32).map((e) => e.id)"""
    )
    assert small == []


def test_the_page_and_the_worker_load_the_same_scripts_in_the_same_order():
    html = (BROWSER / "index.html").read_text()
    listed = re.search(r'data-scripts="([^"]*)"', html)[1].split()
    imported = re.search(r"importScripts\(([^)]*)\)", (BROWSER / "worker.js").read_text())[1]
    assert listed == re.findall(r"'([^']+)'", imported)
    assert all((BROWSER / name).is_file() for name in listed)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("box", "ws://box:7667"),
        ("box:8080", "ws://box:8080"),
        ("http://box", "ws://box:80"),
        ("https://Box:443/#token=abc", "wss://box:443"),
        ("wss://box:8080/gpu/", "wss://box:8080/gpu"),
        ("https://box/gpu/status#token=x", "wss://box:443/gpu"),
        ("[::1]:8080", "ws://[::1]:8080"),
        ("ws://10.0.0.1:8080/#token=t&sha256=00", "ws://10.0.0.1:8080"),
    ],
)
def test_an_address_is_read_as_people_write_it(page, node, origin, written, url):
    page.goto(origin)
    assert page.evaluate(f"servers.parse({written!r}).url") == url


@pytest.mark.parametrize(
    "written", ["", "ws://", "ftp://box", "box:6667", "me@box:1", "box:99999", "https://box:6697/"]
)
def test_an_address_that_can_not_be_is_refused_in_words(page, node, origin, written):
    page.goto(origin)
    told = page.evaluate(
        f"(() => {{ try {{ return servers.parse({written!r}).url }} catch (e) {{ return e.message }} }})()"
    )
    assert " " in told
    assert told.endswith((".", "URL."))
