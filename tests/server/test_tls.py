"""TLS on the server's port: real certificates, both client handshakes, and those who don't speak it."""

import json
import socket
import ssl

import pytest
import trio
import trustme
from edge_port import TOKENS, bearer, read_answer, serving
from server_process import running_server

from wsgrad.errors import Unauthorized
from wsgrad.server.tls import Certificate, fingerprint_of
from wsgrad.transport.cbor import encode
from wsgrad.transport.frames import Closed
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.messages import Chunk, message_array
from wsgrad.transport.tls import check_fingerprint, client_ssl_context
from wsgrad.transport.trio_driver import TrioConnection


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    issued.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(directory / "both.pem")
    authority.cert_pem.write_to_path(directory / "authority.pem")
    return directory


def settings(files):
    cert, key = str(files / "cert.pem"), str(files / "key.pem")
    return {"tls": Certificate(cert, key, renewed=True), "tls_cert": cert, "tls_key": key}


async def encrypted(edge, files):
    context = ssl.create_default_context(cafile=str(files / "authority.pem"))
    return trio.SSLStream(await edge.connect(), context, server_hostname="127.0.0.1", https_compatible=True)


async def test_whose_head_is_late_is_told_so_over_tls(files):
    async with serving(handshake_seconds=1.0, **settings(files)) as edge:
        stream = await encrypted(edge, files)
        await stream.send_all(b"GET /healthz HTT")
        with trio.fail_after(5):
            assert (await read_answer(stream)).status == 408
        await trio.aclose_forcefully(stream)


async def test_http_and_bulk_messages_over_tls(files):
    async with serving(**settings(files)) as edge:
        answer = await edge.ask("/status.json", bearer(TOKENS.client), stream=await encrypted(edge, files))
        assert answer.status == 200
        own = f"Origin: https://127.0.0.1:{edge.number}"
        answer = await edge.ask("/status.json", bearer(TOKENS.client), own, stream=await encrypted(edge, files))
        assert answer.status == 200
        foreign = f"Origin: http://127.0.0.1:{edge.number}"
        answer = await edge.ask("/status.json", bearer(TOKENS.client), foreign, stream=await encrypted(edge, files))
        assert answer.status == 403

        stream = await encrypted(edge, files)
        leftover = await open_websocket(
            stream,
            host=f"127.0.0.1:{edge.number}",
            path="/v1/client",
            headers=[("Authorization", f"Bearer {TOKENS.client}")],
            subprotocols=["wsgrad.v1"],
        )
        client = TrioConnection.from_stream(stream, client=True, max_bulk=1 << 20, leftover=leftover)
        head = message_array(Chunk(0, 0, 0))

        def handle(received):
            assert received.head == head
            client.close(1000, "done")

        client.send(encode(head), bytes(1 << 20))
        assert await client.run(handle) == Closed(1000, "done")


async def test_plain_http_on_a_tls_port_is_told_so(files):
    async with serving(**settings(files)) as edge, await edge.connect() as stream:
        await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await read_answer(stream)
        assert answer.status == 400
        assert b"speaks TLS" in answer.body


@pytest.mark.parametrize("sent", [b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x16" * 20_000])
async def test_who_breaks_off_or_garbles_the_tls_handshake_costs_nobody_else_anything(sent, files, caplog, notes):
    async with serving(handshake_seconds=1.0, **settings(files)) as edge:
        stream = await edge.connect()
        await stream.send_all(sent)
        assert (await edge.ask("/healthz", stream=await encrypted(edge, files))).status == 200
        await stream.aclose()
        silent = await edge.connect()
        await silent.send_all(b"\x16\x03")
        with trio.fail_after(5):
            assert await silent.receive_some() == b""
        await silent.aclose()
        assert "its TLS handshake was not over within 1 s (--handshake-seconds)" in [
            note["why"] for note in notes("refused")
        ]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def shown(edge):
    """The certificate that a new connection sees."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stream = trio.SSLStream(await edge.connect(), context, https_compatible=True)
    await stream.do_handshake()
    der = stream.getpeercert(binary_form=True)
    await stream.aclose()
    return ssl.DER_cert_to_PEM_cert(der).strip()


def pair(authority, directory):
    """A key and a certificate that nobody has seen yet; the certificate's text."""
    issued = authority.issue_cert("127.0.0.1")
    for name, blob in (("cert.pem", issued.cert_chain_pems[0]), ("key.pem", issued.private_key_pem)):
        blob.write_to_path(directory / "new.pem")
        (directory / "new.pem").replace(directory / name)  # as what renews certificates does
    return issued.cert_chain_pems[0].bytes().decode().strip()


async def test_a_renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on(authority, tmp_path, caplog):
    caplog.set_level("INFO")
    first = pair(authority, tmp_path)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    async with serving(**settings(tmp_path)) as edge:
        before = await encrypted(edge, tmp_path)
        await before.do_handshake()
        assert await shown(edge) == first
        second = pair(authority, tmp_path)
        assert await shown(edge) == second != first
        assert (await edge.ask("/healthz", stream=before)).status == 200
        third = pair(authority, tmp_path)
        assert await shown(edge) == third
    told = [record.getMessage() for record in caplog.records if "renewed" in record.getMessage()]
    assert len(told) == 2
    assert fingerprint_of(str(tmp_path / "cert.pem")) in told[1]


@pytest.mark.parametrize("broken", ["cert.pem", "key.pem", "another's key", "no file"])
async def test_a_broken_renewal_is_told_once_and_the_certificate_in_use_stays(broken, authority, tmp_path, caplog):
    first = pair(authority, tmp_path)
    async with serving(**settings(tmp_path)) as edge:
        match broken:
            case "another's key":
                authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(tmp_path / "key.pem")
            case "no file":
                (tmp_path / "cert.pem").unlink()
            case name:
                (tmp_path / name).write_text("-----BEGIN nothing\n")
        assert await shown(edge) == first
        assert await shown(edge) == first
        (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert str(tmp_path) in warned
        assert "stays in use" in warned
        second = pair(authority, tmp_path)
        assert await shown(edge) == second


async def test_a_certificate_that_clients_pin_never_changes_while_the_server_runs(authority, tmp_path):
    first = pair(authority, tmp_path)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    async with serving(tls=Certificate(cert, key, renewed=False), tls_cert=cert, tls_key=key) as edge:
        assert pair(authority, tmp_path) != first
        assert await shown(edge) == first


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls_1_2_and_1_3_are_spoken(version, files):
    async with serving(**settings(files)) as edge:
        context = ssl.create_default_context(cafile=str(files / "authority.pem"))
        context.minimum_version = context.maximum_version = version
        stream = trio.SSLStream(await edge.connect(), context, server_hostname="127.0.0.1", https_compatible=True)
        assert (await edge.ask("/healthz", stream=stream)).status == 200


def test_a_real_server_announces_its_fingerprint(files, tmp_path):
    with running_server(tmp_path, "--device", "none", "--tls-cert", str(files / "both.pem")) as server:
        address, _, fragment = server.ready["url"].partition("#")
        assert address == f"wss://127.0.0.1:{server.ready['port']}/"
        sha256 = fragment.partition("&sha256=")[2]
        plain = socket.create_connection(("127.0.0.1", server.ready["port"]))
        with client_ssl_context(fingerprint=sha256).wrap_socket(plain) as stream:
            der = stream.getpeercert(binary_form=True)
            check_fingerprint(der, sha256)
            with pytest.raises(Unauthorized):
                check_fingerprint(der, "0" * 64)
            stream.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while data := stream.recv(4096):
                answer += data
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"status": "ok"}
        assert server.stop() == 0


@pytest.mark.parametrize("wrong", ["authority.pem", "missing.pem"])
def test_a_wrong_key_is_named(wrong, files, capfd):
    from wsgrad.server.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(["--tls-cert", str(files / "cert.pem"), "--tls-key", str(files / wrong)])
    assert caught.value.code == 2
    assert wrong in capfd.readouterr().err
