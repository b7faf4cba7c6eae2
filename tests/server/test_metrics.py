"""`/metrics`, read by Prometheus's own parser, against the status document it is made from."""

import re
from pathlib import Path

import pytest
from edge_port import TOKENS, bearer
from edge_port import serving as edge_serving
from heart import NOTHING, serving
from prometheus_client.parser import text_string_to_metric_families

from wsgrad.server import metrics
from wsgrad.server.config import Config
from wsgrad.server.statistics import Statistics
from wsgrad.server.status import PortCounters, document
from wsgrad.server.usage import HELD, Usage
from wsgrad.transport import commands as c


def parse(text):
    """Samples by name and labels, and the type of each name."""
    samples, types = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
            types[sample.name] = family.type
            assert family.documentation
    return samples, types


def value(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


async def test_metrics_say_what_the_status_document_says(cache):
    async with serving(cache) as server, server.client() as client:
        queue = await client.open()
        queue.program(1, NOTHING, "nothing", "")
        queue.batch(c.Alloc(1, 64), c.Launch(1, None, None, [], False), c.Read(9, 0, 4))
        await queue.failure()
        status = document(Config(name="box"), PortCounters(), server.hub.status())
        samples, types = parse(metrics.render(status))
        device = {"device": "box/cpu/0", "kind": "cpu"}
        assert value(samples, "wsgrad_device_memory_bytes", **device) == 64
        assert value(samples, "wsgrad_device_launches_total", **device) == 1
        assert value(samples, "wsgrad_device_errors_total", **device) == 1
        assert value(samples, "wsgrad_device_sessions", **device) == 1
        assert value(samples, "wsgrad_device_paused", **device) == 0
        received = status["devices"][0]["totals"]["bytes_in"]
        assert value(samples, "wsgrad_device_received_bytes_total", **device) == received > 0
        assert value(samples, "wsgrad_sessions", connected="yes") == 1
        assert value(samples, "wsgrad_launches_total") == 1
        assert value(samples, "wsgrad_commands_failed_total") == 1
        assert types["wsgrad_launches_total"] == "counter"
        assert types["wsgrad_device_memory_bytes"] == "gauge"
        [version] = [dict(labels) for name, labels in samples if name == "wsgrad_info"]
        assert f"wsgrad {version['version']}" == status["server"]


async def test_every_counter_of_server_and_port_is_there(cache):
    async with serving(cache, devices=()) as server:
        for index, name in enumerate(server.hub.statistics.describe(), 100):
            setattr(server.hub.statistics, name, index)
        counters = PortCounters(7, 8, 9, 10, 11)
        samples, _ = parse(metrics.render(document(Config(), counters, server.hub.status())))
        shown = set(samples.values())
        assert set(range(100, 100 + len(Statistics().describe()))) | {7, 8, 9, 10, 11} <= shown


@pytest.mark.parametrize("label", ['a"b', "a\\b", "a\nb", "a{b}=c", "ä 😀"])
def test_labels_are_escaped(label):
    totals = dict.fromkeys((*HELD, *Usage().describe(), "sessions"), 1)
    hub = {
        "devices": [{"id": label, "kind": "browser", "paused": True, "totals": totals}],
        "nodes": [{}],
        "sessions": [],
        "processes": 0,
        "compiled": 0,
        "compiled_from_cache": 0,
        "statistics": Statistics().describe(),
    }
    samples, _ = parse(metrics.render(document(Config(name=label), PortCounters(), hub)))
    assert value(samples, "wsgrad_device_paused", device=label, kind="browser") == 1
    # A limit that a device does not tell has no sample.
    assert not [name for name, _ in samples if name == "wsgrad_device_memory_limit_bytes"]
    assert [dict(labels)["name"] for name, labels in samples if name == "wsgrad_info"] == [label]


def test_large_counters_keep_their_last_digit():
    lines = []
    metrics._metric(lines, "wsgrad_x_total", "text", [({}, (1 << 53) - 1)])
    [(_, number)] = parse("\n".join(lines) + "\n")[0].items()
    assert number == (1 << 53) - 1


async def test_it_is_served_as_prometheus_asks_for_it():
    async with edge_serving() as edge:
        for token in (TOKENS.client, TOKENS.admin):
            answer = await edge.ask("/metrics", bearer(token))
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            samples, _ = parse(answer.body.decode())
            assert value(samples, "wsgrad_connections") >= 1
            assert token not in answer.body.decode()


def test_the_docs_name_every_metric_and_no_other():
    page = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
    hub = {"devices": [], "nodes": [], "sessions": [], "processes": 0, "compiled": 0, "compiled_from_cache": 0}
    status = document(Config(), PortCounters(), hub | {"statistics": Statistics().describe()})
    rendered = set(re.findall(r"^# TYPE (\S+)", metrics.render(status), re.MULTILINE))
    assert set(re.findall(r"^\| `(wsgrad_\w+)`", page, re.MULTILINE)) == rendered
