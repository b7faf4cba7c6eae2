"""Addresses as users write them: what they mean, what is refused and why, and that a token never shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsgrad.errors import Unauthorized, WsgradError
from wsgrad.transport.tls import certificate_fingerprint, check_fingerprint, client_ssl_context
from wsgrad.transport.url import Endpoint, InvalidUrl, parse_endpoint, parse_endpoints

F = "ab" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu-box", Endpoint("gpu-box")),
        ("gpu_box.local:7000", Endpoint("gpu_box.local", 7000)),
        ("10.0.0.7", Endpoint("10.0.0.7")),
        ("[::1]", Endpoint("::1")),
        ("[fe80::1]:7", Endpoint("fe80::1", 7)),
        ("ws://127.0.0.1:1234/#token=T-_0", Endpoint("127.0.0.1", 1234, token="T-_0")),
        ("WSS://a", Endpoint("a", tls=True)),
        (f"wss://a:7667#token=T&sha256={F}", Endpoint("a", tls=True, token="T", sha256=F)),
        (f"wss://[::1]:9/gpu/#sha256={':'.join(['AB'] * 32)}", Endpoint("::1", 9, tls=True, sha256=F, path="/gpu")),
        ("ws://a#token=a%2Bb", Endpoint("a", token="a+b")),
        ("b*6", Endpoint("b", count=6)),
        ("ws://a#token=T*2", Endpoint("a", token="T", count=2)),
        (" a ", Endpoint("a")),
    ],
)
def test_address_means(text, expected):
    assert parse_endpoint(text) == expected


def test_list_of_servers_from_the_documentation():
    assert parse_endpoints(f"wss://a:7667#token=T&sha256={F}*2,b*6, c") == (
        Endpoint("a", 7667, tls=True, token="T", sha256=F, count=2),
        Endpoint("b", count=6),
        Endpoint("c"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("a,,b", "empty"),
        ("http://a", "'http' is not supported"),
        ("ws://", "host is missing"),
        (":80", "host is missing"),
        ("a:0", "port"),
        ("a:65536", "port"),
        ("a:x", "port"),
        ("a:", "port"),
        ("a:1٣", "port"),
        ("::1", "brackets"),
        ("[::1", "written"),
        ("[::1]x", "written"),
        ("[nonsense]", "not an IPv6 address"),
        ("a b", "not a host name"),
        ("-a", "not a host name"),
        ("a\r\nX: y", "not a host name"),
        ("ws://a/x y", "percent-encoded"),
        ("ws://user:pass@a", "user name"),
        ("ws://a?x=1", "query"),
        ("a*0", "at least 1"),
        ("a*x", "at least 1"),
        ("a*", "at least 1"),
        ("ws://a#sesame", "token="),
        ("ws://a#token=", "empty"),
        ("ws://a#token=a&token=b", "twice"),
        ("ws://a#token=a%0d%0aX", "no token"),
        ("wss://a#sha256=abcd", "64 hex digits"),
        (f"ws://a#sha256={F}", "wss://"),
    ],
)
def test_unreadable_address_says_what_is_wrong(text, words):
    with pytest.raises(InvalidUrl, match=words) as caught:
        parse_endpoints(text)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, WsgradError)


@pytest.mark.parametrize(
    "text",
    [
        "ws://a:x#token=SECRET",
        "http://a#token=SECRET",
        "http://a?token=SECRET",
        "ws://a?token=SECRET",
        "ws://a#SECRET",
        "ws://a#key=SECRET",
        "ws://a#token=SECRET%20",
        "ws://a#token=SECRET*0",
        "ws://a#token=x*SECRET",
        "ws://a*2#token=SECRET",
        "a?token=SECRET*0",
        "a*0?token=SECRET",
        "http://me:SECRET@a",
        "ws://me:SECRET@a*0",
        "ws://me:SECRET@a?x",
        "ws://me:SECRET@a",
    ],
)
def test_no_error_shows_a_secret(text):
    with pytest.raises(InvalidUrl) as caught:
        parse_endpoint(text)
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in repr(caught.value.details)


def test_no_repr_or_str_shows_the_token():
    endpoint = parse_endpoint("ws://a#token=SECRET")
    assert endpoint.token == "SECRET"
    assert "SECRET" not in repr(endpoint) + str(endpoint) + endpoint.url


@given(st.text(max_size=60))
def test_any_text_is_an_endpoint_or_a_named_error(text):
    try:
        endpoint = parse_endpoint(text)
    except InvalidUrl:
        return
    assert parse_endpoint(endpoint.url) == Endpoint(endpoint.host, endpoint.port, endpoint.tls, path=endpoint.path)


def test_what_goes_into_the_request():
    assert parse_endpoint("[::1]:80").authority == "[::1]:80"
    assert parse_endpoint("ws://a/gpu/").target("/v1/client") == "/gpu/v1/client"
    assert parse_endpoint("a").target("/v1/client") == "/v1/client"


def test_fingerprint_of_another_certificate_is_refused_with_both_named():
    check_fingerprint(b"certificate", certificate_fingerprint(b"certificate").upper())
    with pytest.raises(Unauthorized, match="another server") as caught:
        check_fingerprint(b"certificate", F)
    assert caught.value.details == {"expected": F, "actual": certificate_fingerprint(b"certificate")}
    with pytest.raises(Unauthorized, match="none"):
        check_fingerprint(None, F)


def test_without_a_fingerprint_names_and_authorities_are_checked():
    assert client_ssl_context().check_hostname
    assert not client_ssl_context(fingerprint=F).check_hostname


@pytest.mark.parametrize(
    "fragment", ["sha256=ab#token=very-secret", "sha256=very-secret", "sha256=ab,token=very-secret"]
)
def test_a_fingerprint_that_is_none_is_not_shown_since_a_token_may_stand_in_it(fragment):
    with pytest.raises(InvalidUrl, match="64 hex digits") as caught:
        parse_endpoint(f"wss://box#{fragment}")
    assert "very-secret" not in str(caught.value)
