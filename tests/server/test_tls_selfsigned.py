"""`--tls`: the certificate a server makes for itself, how long it is kept, and the clients that trust it."""

import contextlib
import datetime
import ipaddress
import os
import pty
import re
import signal
import ssl
import stat
import struct
import subprocess
import sys
import termios
import threading
from fcntl import ioctl

import pytest
from cryptography import x509
from server_process import environment, running_server

import wsgrad
from wsgrad.server import addresses, invitation, selfsigned
from wsgrad.server.config import Config
from wsgrad.server.tls import TlsError, fingerprint_of, tls_context
from wsgrad.transport.tls import client_ssl_context

NO_DEVICE = ("--device", "none")


@pytest.fixture(autouse=True)
def _few_addresses(monkeypatch):
    """The machine's real ones may change while a test runs."""
    found = frozenset(map(ipaddress.ip_address, ("127.0.0.1", "::1", "192.0.2.7")))
    monkeypatch.setattr(selfsigned, "own_addresses", lambda: found)
    monkeypatch.setattr(addresses, "own_addresses", lambda: found)


def certificate(kept):
    return x509.load_pem_x509_certificate(kept.certificate.read_bytes())


def alternatives(kept):
    extension = certificate(kept).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(extension.get_values_for_type(x509.DNSName)), set(
        map(str, extension.get_values_for_type(x509.IPAddress))
    )


def test_it_is_made_for_the_names_and_addresses_and_only_its_owner_reads_the_key(tmp_path):
    config = Config(host="box.example", allow_hosts=("gpu.example", "[fd00::5]:7000", "10.0.0.9:80"))
    kept = selfsigned.keep_certificate(config, tmp_path / "state")
    names, found = alternatives(kept)
    assert {"localhost", "box.example", "gpu.example"} <= names
    assert found == {"127.0.0.1", "::1", "192.0.2.7", "fd00::5", "10.0.0.9"}
    assert stat.S_IMODE(kept.pair.stat().st_mode) == 0o600
    assert b"PRIVATE KEY" not in kept.certificate.read_bytes()
    assert fingerprint_of(str(kept.pair)) == fingerprint_of(str(kept.certificate))
    assert kept.replaces is None
    tls_context(str(kept.pair), "")
    left = certificate(kept).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(365) < left < datetime.timedelta(825)


def test_it_is_kept_for_the_next_start(tmp_path):
    first = selfsigned.keep_certificate(Config(), tmp_path)
    before = first.pair.read_bytes()
    first.certificate.unlink()
    second = selfsigned.keep_certificate(Config(), tmp_path)
    assert second.pair.read_bytes() == before
    assert second.replaces is None
    assert fingerprint_of(str(second.certificate)) == fingerprint_of(str(second.pair))


def test_a_new_name_or_address_renews_it_and_it_keeps_the_names_of_the_one_before(tmp_path, monkeypatch):
    selfsigned.keep_certificate(Config(allow_hosts=("a.example",)), tmp_path)
    kept = selfsigned.keep_certificate(Config(allow_hosts=("b.example",)), tmp_path)
    assert kept.replaces == "lacks b.example"
    assert {"a.example", "b.example"} <= alternatives(kept)[0]
    # So two servers of one machine don't take turns at renewing.
    assert selfsigned.keep_certificate(Config(allow_hosts=("a.example",)), tmp_path).replaces is None
    monkeypatch.setattr(selfsigned, "own_addresses", lambda: frozenset({ipaddress.ip_address("198.51.100.3")}))
    kept = selfsigned.keep_certificate(Config(), tmp_path)
    assert kept.replaces == "lacks 198.51.100.3"
    assert alternatives(kept)[1] == {"127.0.0.1", "198.51.100.3"}


@pytest.mark.parametrize(
    ("days", "why"), [(-selfsigned.VALID_DAYS + selfsigned.LEAST_DAYS - 1, "ends on"), (5, "not valid yet")]
)
def test_it_is_renewed_before_its_end_and_where_a_clock_was_wrong(days, why, tmp_path):
    names, found = selfsigned.names_of(Config())
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    (tmp_path / "tls-key-and-certificate.pem").write_text("".join(selfsigned.make(names, found, now=then)))
    assert why in selfsigned.keep_certificate(Config(), tmp_path).replaces
    assert selfsigned.keep_certificate(Config(), tmp_path).replaces is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_damaged_file_is_replaced(content, tmp_path):
    (tmp_path / "tls-key-and-certificate.pem").write_bytes(content)
    kept = selfsigned.keep_certificate(Config(), tmp_path)
    tls_context(str(kept.pair), "")


def test_a_key_of_another_certificate_is_replaced(tmp_path):
    names, found = selfsigned.names_of(Config())
    key, _ = selfsigned.make(names, found)
    _, other = selfsigned.make(names, found)
    (tmp_path / "tls-key-and-certificate.pem").write_text(key + other)
    kept = selfsigned.keep_certificate(Config(), tmp_path)
    assert kept.pair.read_text() != key + other
    tls_context(str(kept.pair), "")


def test_servers_that_start_together_agree_on_one(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(selfsigned.keep_certificate(Config(), tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert not [name for name in os.listdir(tmp_path) if re.search(r"\.[0-9a-f]{12}$", name)]


def test_where_it_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TlsError, match=r"--tls: .*file.* can't be used: .*--tls-cert"):
        selfsigned.keep_certificate(Config(), tmp_path / "file" / "state")


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(TlsError, match=r"pip install 'wsgrad\[tls\]'"):
        selfsigned.keep_certificate(Config(), tmp_path)


def test_this_machine_s_addresses_hold_loopback_and_the_way_out(monkeypatch):
    monkeypatch.undo()
    found = addresses.own_addresses()
    assert {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")} <= found
    outward = addresses.outward_address()
    assert outward is None or outward in found
    assert not [address for address in found if address.version == 6 and address.is_link_local]
    monkeypatch.setattr(addresses.socket, "AF_NETLINK", 999)
    assert ipaddress.ip_address("127.0.0.1") in addresses.own_addresses()


def test_an_authority_file_passes_the_strict_checks_of_later_pythons(tmp_path):
    kept = selfsigned.keep_certificate(Config(), tmp_path)
    server = tls_context(str(kept.pair), "")
    client = client_ssl_context(cafile=str(kept.certificate))
    client.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    ins, outs = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(ins, outs, server_hostname="127.0.0.1")
    theirs = server.wrap_bio(outs, ins, server_side=True)
    for _ in range(4):
        for end in (ours, theirs):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert ours.version() == "TLSv1.3"


def test_clients_trust_it_by_fingerprint_by_file_or_by_the_environment_and_else_not(tmp_path, monkeypatch):
    state = {"XDG_STATE_HOME": str(tmp_path)}
    with running_server(tmp_path, "--tls", *NO_DEVICE, variables=state) as server:
        url = server.ready["url"]
        assert re.search(r"^wss://.*&sha256=[0-9a-f]{64}$", url)
        bare = url.partition("&sha256")[0]
        authority = str(tmp_path / "wsgrad" / "tls-certificate.pem")
        assert authority in server.log()
        for options in ({"url": url}, {"url": bare, "cafile": authority}):
            with wsgrad.connect(**options) as session:
                assert not session.devices
        with pytest.raises(wsgrad.WsgradError, match="sha256"):
            wsgrad.connect(bare)
        wrong = f"{bare}&sha256={'0' * 64}"
        with pytest.raises(wsgrad.Unauthorized, match="fingerprint"):
            wsgrad.connect(wrong)
        monkeypatch.setenv("SSL_CERT_FILE", authority)
        with wsgrad.connect(bare) as session:
            assert not session.devices


async def test_the_trio_face_trusts_it_the_same_ways(tmp_path):
    with running_server(tmp_path, "--tls", *NO_DEVICE, variables={"XDG_STATE_HOME": str(tmp_path)}) as server:
        url = server.ready["url"]
        bare = url.partition("&sha256")[0]
        for options in ({"url": url}, {"url": bare, "cafile": str(tmp_path / "wsgrad" / "tls-certificate.pem")}):
            async with wsgrad.open_server(**options) as session:
                assert not session.devices
        with pytest.raises(wsgrad.WsgradError, match="sha256"):
            async with wsgrad.open_server(bare):
                pass


def on_a_terminal(
    directory, *arguments, columns=100, encoding="utf-8", wanted="ADMIN_TOKEN=[^\r]+\r\n.*at http[^\r]+\r\n"
):
    """What a server prints to a terminal until `wanted` has come and it was stopped."""
    primary, secondary = pty.openpty()
    ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {"XDG_STATE_HOME": str(directory), "XDG_RUNTIME_DIR": str(directory), "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "wsgrad.server", "--port", "0", *NO_DEVICE, *arguments]
    with subprocess.Popen(
        command, env=environment(**variables), stdin=secondary, stdout=secondary, stderr=secondary
    ) as process:
        os.close(secondary)
        output = b""
        while not re.search(wanted, output.decode("utf-8", "replace"), re.DOTALL):
            output += os.read(primary, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # so a terminal says that its programs are gone
            while True:
                output += os.read(primary, 4096)
        assert process.wait(20) == 0
    os.close(primary)
    return output.decode("utf-8", "replace")


def test_a_terminal_is_shown_the_page_s_url_with_a_code_of_it(tmp_path):
    last_row = "\x1b\\[97;40m▀+\x1b"
    output = on_a_terminal(tmp_path, "--host", "0.0.0.0", "--tls", wanted=last_row)
    node = re.search(r"WSGRAD_NODE_TOKEN=([\w-]+)", output)[1]
    page = re.search(r"becomes a device at (https://([\d.]+):\d+/#token=([\w-]+))\r\n", output)
    assert page[3] == node
    assert ipaddress.ip_address(page[2])
    drawn = re.findall(r"\x1b\[97;40m([ █▀▄]+)\x1b\[0m", output)
    expected = re.findall(r"\x1b\[97;40m([ █▀▄]+)\x1b\[0m", invitation.terminal_code(page[1], 100))
    assert drawn == expected
    assert len(drawn) > 15


@pytest.mark.parametrize("options", [{"columns": 20}, {"encoding": "ascii"}], ids=["narrow", "ascii"])
def test_a_terminal_that_can_not_show_a_code_gets_the_url_alone(options, tmp_path):
    output = on_a_terminal(tmp_path, "--host", "0.0.0.0", "--tls", **options)
    assert "becomes a device at https://" in output
    assert "█" not in output
    assert "Traceback" not in output


def test_without_tls_others_are_told_that_phones_need_it(tmp_path):
    output = on_a_terminal(tmp_path, "--host", "0.0.0.0", wanted="start with --tls\r\n")
    assert "becomes a device at http://" in output
    assert "█" not in output


def test_on_loopback_the_page_is_this_machine_s_own(tmp_path):
    output = on_a_terminal(tmp_path)
    assert re.search(r"becomes a device at http://127\.0\.0\.1:\d+/#token=", output)
    assert "start with --tls" not in output
    assert "█" not in output


@pytest.mark.parametrize(
    ("config", "asked", "page"),
    [
        ({}, None, "http://127.0.0.1:7000/"),
        ({}, "localhost:7000", "http://localhost:7000/"),
        ({"host": "::1"}, None, "http://[::1]:7000/"),
        ({"host": "0.0.0.0", "self_signed": True}, "127.0.0.1:7000", "https://192.0.2.7:7000/"),
        ({"host": "0.0.0.0", "self_signed": True}, "box:7000", "https://box:7000/"),
        ({"host": "gpu.example"}, "localhost:7000", "http://gpu.example:7000/"),
        ({"host": "0.0.0.0"}, "[fd00::5]", "http://[fd00::5]/"),
        ({"host": "0.0.0.0"}, "not a host", "http://192.0.2.7:7000/"),
    ],
)
def test_the_page_s_address_is_one_that_the_asker_or_another_machine_can_open(config, asked, page, monkeypatch):
    monkeypatch.setattr(addresses, "outward_address", lambda: ipaddress.ip_address("192.0.2.7"))
    assert invitation.page_address(Config(**config), 7000, asked=asked) == page


def test_a_machine_that_goes_nowhere_is_reached_by_what_it_has(monkeypatch):
    monkeypatch.setattr(addresses, "outward_address", lambda: None)
    assert addresses.reachable_address("0.0.0.0") == "192.0.2.7"
    monkeypatch.setattr(addresses, "own_addresses", lambda: frozenset({ipaddress.ip_address("127.0.0.1")}))
    assert addresses.reachable_address("::") == "127.0.0.1"


def test_the_code_is_svg_that_stands_by_itself(monkeypatch):
    svg = invitation.svg_code("https://192.0.2.7:7000/#token=abc")
    assert svg.startswith("data:image/svg+xml;")
    monkeypatch.setitem(sys.modules, "segno", None)
    assert invitation.svg_code("https://x/") is None
    assert invitation.terminal_code("https://x/", 100) is None


async def test_tls_to_a_port_without_it_is_explained(tmp_path):
    with running_server(tmp_path, *NO_DEVICE) as server:
        url = server.ready["url"].replace("ws://", "wss://")
        with pytest.raises(wsgrad.ConnectionLost, match=r"does not speak TLS there; .*ws://"):
            wsgrad.connect(url)
        with pytest.raises(wsgrad.ConnectionLost, match=r"does not speak TLS there; .*ws://"):
            async with wsgrad.open_server(url):
                pass


def test_mistakes_in_certificate_files_are_named(tmp_path):
    key, cert = selfsigned.make(frozenset({"a"}), frozenset())
    other, _ = selfsigned.make(frozenset({"a"}), frozenset())

    def file(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    good, bare = file("cert.pem", cert), file("key.pem", key)
    damaged = file("damaged.pem", cert.replace("MII", "MIJ"))
    locked = file("locked.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for files, words in (
        ((file("text", "hello"), ""), "holds no certificate in PEM"),
        ((good, ""), "name its file with --tls-key"),
        ((good, good), "--tls-key: .* holds no private key"),
        ((good, file("other.pem", other)), "does not belong to the certificate"),
        ((good, locked), "is encrypted"),
        ((damaged, bare), "is damaged"),
        ((good, str(tmp_path / "none")), "can't be read: No such file"),
        ((str(tmp_path), bare), "can't be read: Is a directory"),
    ):
        with pytest.raises(TlsError, match=words):
            tls_context(*files)
    tls_context(good, bare)
