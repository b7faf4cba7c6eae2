"""What `/status.json` counts for devices, nodes and sessions, and what it shows to whom."""

import json

import pytest
from edge_port import TOKENS, bearer
from edge_port import serving as edge_serving
from heart import ADD, CRASH, NOTHING, eventually, serving
from raw_node import raw_node

from wsgrad.server.config import Config
from wsgrad.server.statistics import Statistics
from wsgrad.server.status import PortCounters, document, shown_to
from wsgrad.server.tokens import Role
from wsgrad.server.usage import MAX_ERRORS, MAX_MESSAGE, Ledger, Usage
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m


@pytest.fixture
async def server(cache):
    async with serving(cache, devices=("cpu", "cpu")) as server:
        yield server


def totals(server, device="box/cpu/0"):
    """A device's, after checking them against the whole document."""
    status = server.hub.status()
    by_device = {found["id"]: found["totals"] for found in status["devices"]}
    for key in ("memory", "buffers", "programs", "launches", "bytes_in", "bytes_out", "errors"):
        assert status["totals"][key] == sum(found[key] for found in by_device.values())
    json.dumps(status)
    return by_device[device]


async def test_a_device_shows_what_sessions_hold_on_it_and_the_other_device_does_not(server):
    async with server.client() as client, server.client() as other:
        queue, second = await client.open(), await other.open()
        queue.program(1, ADD, "add", "ppfi")
        queue.batch(c.Alloc(1, 64), c.Alloc(2, 32), c.View(3, 1, 0, 8))
        second.batch(c.Alloc(1, 100))
        await queue.done()
        await second.done()
        held = totals(server)
        assert (held["memory"], held["buffers"], held["programs"], held["sessions"]) == (196, 4, 1, 2)
        assert not any(totals(server, "box/cpu/1").values())
        sessions = server.hub.status()["sessions"]
        assert [session["totals"]["memory"] for session in sessions] == [96, 100]
        assert [session["devices"] for session in sessions] == [["box/cpu/0"]] * 2
        assert sessions[0]["client"] == "test"
        assert sessions[0]["connected"] is True
        assert 0 <= sessions[0]["seconds"] < 60
        # A base whose id is free stays as long as a view needs it.
        queue.batch(c.Free(1), c.Free(2), c.Drop(1))
        await queue.done()
        assert totals(server)["memory"] == 164
        queue.batch(c.Free(3))
        await queue.done()
        assert totals(server)["memory"] == 100
        assert totals(server)["programs"] == 0


async def test_launches_of_every_kind_are_counted(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, NOTHING, "nothing", "")
        queue.launches([1, 0] * 30, 30)
        queue.batch(*[c.Launch(1, None, None, [], False)] * 5)
        await queue.done()
        assert totals(server)["launches"] == server.hub.statistics.launches == 35
        assert server.hub.status()["sessions"][0]["totals"]["launches"] == 35


async def test_bytes_are_counted_both_ways(server):
    data = bytes(3 << 20)
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Alloc(1, len(data)))
        await queue.done()
        before = totals(server)
        await queue.upload(1, data)
        await queue.done()
        after = totals(server)
        assert len(data) <= after["bytes_in"] - before["bytes_in"] < len(data) + 4096
        assert after["bytes_out"] == before["bytes_out"]
        await queue.download(1, 0, len(data))
        assert totals(server)["bytes_out"] - after["bytes_out"] == len(data)
        await queue.read(1, 0, 100)
        assert totals(server)["bytes_out"] - after["bytes_out"] == len(data) + 100


async def test_a_transfer_between_devices_counts_on_both(server):
    nbytes = (2 << 20) + 5
    async with server.client() as client:
        source, target = await client.open(), await client.open("box/cpu/1", number=2)
        source.batch(c.Alloc(1, nbytes))
        target.batch(c.Alloc(1, nbytes))
        source.batch(c.Send(7, 1, 0, nbytes, 0))
        target.batch(c.Receive(7, 1, 0, nbytes, 0))
        await source.done()
        await target.done()
        assert totals(server)["bytes_out"] == nbytes
        assert nbytes <= totals(server, "box/cpu/1")["bytes_in"] < nbytes + 4096


async def test_what_an_ended_session_did_stays_with_the_device_and_what_it_held_does_not(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, NOTHING, "nothing", "")
        queue.batch(c.Alloc(1, 64), c.Launch(1, None, None, [], False))
        await queue.done()
        client.send(m.Bye())
        await client.wait_closed()
    await eventually(lambda: not server.hub.status()["sessions"])
    left = totals(server)
    assert (left["memory"], left["buffers"], left["programs"], left["sessions"]) == (0, 0, 0, 0)
    assert left["launches"] == 1
    assert left["bytes_in"] > 0


async def test_the_last_errors_name_device_session_and_code(server):
    async with server.client() as client:
        queue = await client.open()
        queue.batch(c.Read(9, 0, 4))
        await queue.failure()
        [error] = server.hub.status()["errors"]
        assert error["time"] > 0
        assert (error["device"], error["code"]) == ("box/cpu/0", "DeviceError")
        assert error["session"] == server.hub.status()["sessions"][0]["session"]
        assert "there is no buffer 9" in error["message"]
        assert totals(server)["errors"] == 1


async def test_a_lost_device_is_an_error_too(server):
    async with server.client() as client:
        queue = await client.open()
        queue.program(1, CRASH, "crash", "p")
        queue.batch(c.Alloc(1, 4), c.Launch(1, None, None, [1], False))
        await queue.failure()
        assert server.hub.status()["errors"][-1]["code"] == "DeviceLost"
        assert "crash" in server.hub.status()["errors"][-1]["message"]
        assert (totals(server)["errors"], totals(server)["memory"]) == (1, 0)
        assert server.hub.statistics.lost == 1


async def test_devices_that_do_not_exist_cost_no_memory_here(server):
    async with server.client() as client:
        for number in range(1, 30):
            client.send(m.Open(number, f"box/none/{number}", {}))
            await client.next(m.Failed)
        assert list(server.session(client).usages) == []


async def test_a_node_has_the_totals_of_its_devices(server):
    devices = ({"kind": "cpu", "dialects": ["c"]}, {"kind": "browser", "dialects": ["wgsl"]})
    async with raw_node(server, devices=devices):
        [node] = server.hub.status()["nodes"]
        assert node["devices"] == ["raw/cpu/0", "raw/browser/0"]
        assert node["totals"] == dict.fromkeys(node["totals"], 0)
        server.hub.ledger.absorb({"raw/cpu/0": Usage(launches=2), "raw/browser/0": Usage(launches=3, errors=1)})
        [node] = server.hub.status()["nodes"]
        assert (node["totals"]["launches"], node["totals"]["errors"]) == (5, 1)


def test_errors_are_bounded_and_the_same_one_again_only_moves_its_time_on():
    ledger = Ledger()
    for number in range(3 * MAX_ERRORS):
        ledger.note(device="d", session=number, code="DeviceError", message="x" * 10_000)
        ledger.note(device="d", session=number, code="DeviceError", message="x" * 10_000)
    assert [error["session"] for error in ledger.errors] == list(range(2 * MAX_ERRORS, 3 * MAX_ERRORS))
    assert all(len(error["message"]) <= MAX_MESSAGE + 1 for error in ledger.errors)


def test_usage_counts_in_the_server_s_statistics_as_well():
    statistics = Statistics()
    usage = Usage(statistics=statistics)
    usage.launched(7)
    assert usage.launches == statistics.launches == 7


def shown(role, page="https://192.0.2.7:7000/"):
    error = {"time": 1.0, "device": "d", "session": 1, "code": "CompileError", "message": "int secret;"}
    found = document(Config(name="box"), PortCounters(), {"errors": [error]})
    return shown_to(role, found, page=page, node_token="node-token")


def test_only_an_administrator_is_shown_the_node_token_its_code_and_what_errors_say():
    admin = shown(Role.ADMIN)
    assert (admin["role"], admin["page_url"]) == ("admin", "https://192.0.2.7:7000/")
    assert admin["join_url"] == "https://192.0.2.7:7000/#token=node-token"
    assert admin["qr"].startswith("data:image/svg+xml;")
    assert admin["errors"][0]["message"] == "int secret;"
    client = shown(Role.CLIENT)
    assert (client["role"], client["page_url"]) == ("client", "https://192.0.2.7:7000/")
    assert "node-token" not in json.dumps(client)
    assert "secret" not in json.dumps(client)
    assert client["errors"][0]["code"] == "CompileError"
    assert "qr" not in client


def test_a_page_that_only_this_machine_can_open_is_no_invitation():
    admin = shown(Role.ADMIN, page="http://127.0.0.1:7000/")
    assert admin["page_url"] is None
    assert "qr" not in admin
    assert admin["join_url"] == "http://127.0.0.1:7000/#token=node-token"


async def test_the_page_s_address_is_the_one_that_the_asker_used():
    async with edge_serving(allow_hosts=("gpu.example",), trusted_proxies=("127.0.0.1/32",)) as edge:
        asked = ("X-Forwarded-Proto: https", "X-Forwarded-Host: gpu.example")
        answer = await edge.ask("/status.json", bearer(TOKENS.admin), *asked)
        value = json.loads(answer.body)
        assert value["page_url"] == "https://gpu.example/"
        assert value["join_url"] == f"https://gpu.example/#token={TOKENS.node}"
        value = json.loads((await edge.ask("/status.json", bearer(TOKENS.client))).body)
        assert (value["role"], value["page_url"]) == ("client", None)
        assert TOKENS.node not in json.dumps(value)


@pytest.mark.parametrize("path", ["/status.json", "/metrics"])
async def test_who_may_not_see_it_is_told_which_token_is_needed(path):
    async with edge_serving() as edge:
        assert (await edge.ask(path)).status == 401
        assert (await edge.ask(path, bearer(TOKENS.node))).status == 403
        assert (await edge.ask(path, bearer(TOKENS.client), host="attacker.example")).status == 421
        assert (await edge.ask(path, bearer(TOKENS.client), "Origin: https://attacker.example")).status == 403
        assert (await edge.ask(path, bearer(TOKENS.client), method="HEAD")).body == b""
