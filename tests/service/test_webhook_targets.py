"""Where webhooks may go, and how one attempt ends: against real receivers, with names that resolve as is told."""

from __future__ import annotations

import ipaddress
import ssl
import subprocess
import threading
import time

import pytest

from service.webhooks.sending import LONGEST_WAIT_S, Sender
from service.webhooks.signing import Message, new_secret, signature
from service.webhooks.targets import BadTarget, TargetNotAllowed, TargetRules, checked_addresses, parse
from tests.service.receivers import receiver, reply

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
OPEN = TargetRules(allow_http=True, allowed_networks=LOOPBACK)
MESSAGE = Message("delivery_1", b'{"type":"webhook.test"}')
SECRET = new_secret()

REFUSED = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",  # IPv4-compatible
    "::ffff:127.0.0.1",  # IPv4-mapped
    "::ffff:a9fe:a9fe",
    "64:ff9b::10.0.0.1",  # NAT64
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",  # NAT64 of one's own
    "100::1",
    "2001::1",  # Teredo
    "2001:db8::1",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "2002:808:808::",
    "3fff::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "febf::1",
    "fec0::1",
    "ff02::1",
]
PUBLIC = ["8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]


def addresses_of(*found: str, rules: TargetRules = TargetRules()):  # noqa: B008 - frozen
    return checked_addresses(parse("https://hooks.example/x", rules), rules, lambda _host, _port: list(found))


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public_is_refused(address):
    with pytest.raises(TargetNotAllowed) as refused:
        addresses_of(address)
    assert address not in str(refused.value)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_taken(address):
    assert addresses_of(address) == [address]


def test_one_private_address_among_several_is_enough_to_refuse_a_name():
    with pytest.raises(TargetNotAllowed, match="private"):
        addresses_of("8.8.8.8", "10.0.0.1")


@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3"])
def test_an_administrator_can_allow_a_network(address):
    rules = TargetRules(allowed_networks=(ipaddress.ip_network("10.1.0.0/16"),))
    assert addresses_of(address, rules=rules) == [address]
    with pytest.raises(TargetNotAllowed):
        addresses_of("10.2.0.1", rules=rules)
    with pytest.raises(TargetNotAllowed):
        addresses_of("fd00::1", rules=rules)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://hooks.example/", "https"),
        ("ftp://hooks.example/", "https"),
        ("file:///etc/passwd", "https"),
        ("https:///path", "host"),
        ("hooks.example/path", "https"),
        ("https://user:secret@hooks.example/", "user or password"),
        ("https://hooks.example/#part", "fragment"),
        ("https://hooks.example:0/", "port"),
        ("https://hooks.example:99999/", "port"),
        ("https://[::1/", "not a URL"),
        ("https://" + "a" * 3000 + "/", "longer"),
    ],
)
def test_a_url_that_no_webhook_can_have_is_refused(url, said):
    with pytest.raises(BadTarget, match=said) as refused:
        parse(url, TargetRules())
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["https://127.1/", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/"]
)
def test_other_spellings_of_loopback_are_resolved_before_they_are_judged(url):
    with pytest.raises((TargetNotAllowed, BadTarget)):
        Sender(TargetRules()).check(url)


def test_a_name_without_an_address_is_told():
    def nothing(_host, _port):
        raise OSError("no such name")

    with pytest.raises(BadTarget, match="no address"):
        checked_addresses(parse("https://hooks.example/", TargetRules()), TargetRules(), nothing)
    assert "no address" in Sender(OPEN, resolver=nothing).send("https://hooks.example/", MESSAGE, [SECRET]).error


def test_a_signature_is_that_of_the_specification():
    # Test vector of the reference implementations, github.com/standard-webhooks/standard-webhooks.
    message = Message("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}')
    made = signature("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", message, 1614265330)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_delivery_is_signed_with_every_secret_that_is_valid():
    old, new, other = new_secret(), new_secret(), new_secret()
    with receiver() as there:
        outcome = Sender(OPEN).send(there.url + "?team=7", MESSAGE, [new, old])
    assert (outcome.status, outcome.error, outcome.delivered) == (204, None, True)
    [got] = there.came
    assert (got.path, got.body, got.id) == ("/hook?team=7", MESSAGE.body, MESSAGE.id)
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 30
    assert got.is_signed_with(new)
    assert got.is_signed_with(old)
    assert not got.is_signed_with(other)
    assert got.headers["content-type"] == "application/json"


def test_the_connection_goes_to_the_address_that_was_checked():
    """A name that resolves to something harmless and then to something else gets the harmless one."""
    with receiver() as there, receiver(host="127.0.0.2") as inside:
        port = there.url.rsplit(":", 1)[1]
        asked = []

        def rebinding(_host, _port):
            asked.append(_host)
            return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

        outcome = Sender(OPEN, resolver=rebinding).send(f"http://rebinding.example:{port}", MESSAGE, [SECRET])
        assert outcome.delivered
        assert asked == ["rebinding.example"]
        assert there.came[0].headers["host"] == f"rebinding.example:{port.split('/')[0]}"
        assert inside.came == []


def test_no_proxy_of_the_environment_is_asked(monkeypatch):
    with receiver() as there, receiver() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert Sender(OPEN).send(there.url, MESSAGE, [SECRET]).delivered
        assert (len(there.came), len(proxy.came)) == (1, 0)


def test_the_next_address_is_tried_where_one_does_not_answer():
    with receiver() as there:
        sender = Sender(OPEN, resolver=lambda _host, _port: ["127.0.0.9", "127.0.0.1"])
        assert sender.send(there.url.replace("127.0.0.1", "several.example"), MESSAGE, [SECRET]).delivered


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_a_failure_that_says_so(status):
    with receiver() as there, receiver() as elsewhere:
        there.answer = lambda handler: reply(handler, status, {"Location": elsewhere.url})
        outcome = Sender(OPEN).send(there.url, MESSAGE, [SECRET])
        assert (outcome.status, outcome.delivered, elsewhere.came) == (status, False, [])
        assert "redirects are not followed" in outcome.error


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120), ("999999999", LONGEST_WAIT_S), ("soon", 0), ("-5", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_a_receiver_can_ask_to_be_left_alone(header, seconds):
    with receiver() as there:
        there.answer = lambda handler: reply(handler, 429, {"Retry-After": header})
        outcome = Sender(OPEN).send(there.url, MESSAGE, [SECRET])
    assert (outcome.status, outcome.retry_after_s) == (429, seconds)


def test_a_receiver_that_never_answers_is_given_up():
    over = threading.Event()
    with receiver() as there:
        there.answer = lambda _handler: over.wait(10)
        began = time.monotonic()
        outcome = Sender(OPEN, timeout_s=0.3).send(there.url, MESSAGE, [SECRET])
        over.set()
    assert (outcome.status, outcome.error) == (None, "no answer within 0.3 s")
    assert time.monotonic() - began < 3


def test_a_receiver_that_drips_its_answer_is_given_up_as_well():
    over = threading.Event()

    def drip(handler):
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Filler: 1\r\n" * 1000:
            handler.wfile.write(bytes([byte]))
            if over.wait(0.05):
                return

    with receiver() as there:
        there.answer = drip
        began = time.monotonic()
        outcome = Sender(OPEN, timeout_s=0.5).send(there.url, MESSAGE, [SECRET])
        over.set()
    assert (outcome.status, outcome.error) == (None, "no answer within 0.5 s")
    assert time.monotonic() - began < 3


def test_a_huge_answer_is_not_read():
    sent = []

    def flood(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b"x" * 65536)
            sent.append(65536)

    with receiver() as there:
        there.answer = flood
        assert Sender(OPEN).send(there.url, MESSAGE, [SECRET]).delivered
    assert sum(sent) < 32 * 2**20


@pytest.mark.parametrize("answer", [b"not http at all\r\n\r\n", b"HTTP/1.1 200", b""])
def test_an_answer_that_is_no_http_is_a_failure(answer):
    with receiver() as there:
        there.answer = lambda handler: handler.wfile.write(answer)
        outcome = Sender(OPEN).send(there.url, MESSAGE, [SECRET])
    assert outcome.status is None
    assert outcome.error


def test_a_closed_port_is_a_failure():
    with receiver() as there:
        url = there.url
    outcome = Sender(OPEN).send(url, MESSAGE, [SECRET])
    assert outcome.status is None
    assert "refused" in outcome.error


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(made, check=True, capture_output=True)
    return folder


@pytest.mark.system("openssl")
def test_the_certificate_is_checked_against_the_name_in_the_url(certificate):
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    rules = TargetRules(allowed_networks=LOOPBACK)

    def here(_host, _port):
        return ["127.0.0.1"]

    with receiver(tls=served) as there:
        url = there.url.replace("127.0.0.1", "hooks.example")
        assert Sender(rules, ssl_context=trusting, resolver=here).send(url, MESSAGE, [SECRET]).delivered
        assert there.came[0].headers["host"].startswith("hooks.example:")
        other = url.replace("hooks.example", "other.example")
        for sender, asked in (
            (Sender(rules, ssl_context=trusting, resolver=here), other),
            (Sender(rules, resolver=here), url),
        ):
            outcome = sender.send(asked, MESSAGE, [SECRET])
            assert outcome.status is None
            assert "certificate" in outcome.error.lower()
        assert len(there.came) == 1
