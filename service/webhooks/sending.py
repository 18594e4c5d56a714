"""One attempt at a delivery: a signed POST to an address that was checked, and what came of it.

No redirect is followed, no proxy asked, nothing of the answer kept but its status.
"""

from __future__ import annotations

import email.utils
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpcore
import httpx

from service.times import now
from service.webhooks.signing import Message, headers
from service.webhooks.targets import (
    BadTarget,
    Resolver,
    TargetNotAllowed,
    TargetRules,
    checked_addresses,
    parse,
    resolve,
)
from workers.manifest import program_version

TIMEOUT_S = 10.0
"""For everything from the connection to the end of the answer, however slowly the bytes come."""

MOST_ANSWER_BYTES = 64 * 1024
MOST_ERROR_LENGTH = 300
ASKS_TO_WAIT = (429, 503)
LONGEST_WAIT_S = 24 * 3600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: the status of the answer, or why there was none; ``error`` is None when it arrived."""

    status: int | None
    error: str | None
    retry_after_s: float = 0.0

    @property
    def delivered(self) -> bool:
        return self.error is None


class Sender:
    """Sends; thread-safe. What may be given besides the rules is for tests."""

    def __init__(
        self,
        rules: TargetRules,
        *,
        ssl_context: ssl.SSLContext | None = None,
        resolver: Resolver = resolve,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rules = rules
        self._ssl_context = ssl_context or httpx.create_ssl_context()
        self._resolver = resolver
        self._timeout_s = timeout_s

    def check(self, url: str) -> None:
        """Whether a delivery may go to this URL; ``BadTarget`` or ``TargetNotAllowed`` otherwise."""
        checked_addresses(parse(url, self.rules), self.rules, self._resolver)

    def send(self, url: str, message: Message, secrets: list[str]) -> Outcome:
        """Make one attempt. Never raises for what the receiver, the network or the URL is to blame for."""
        deadline = time.monotonic() + self._timeout_s
        try:
            target = parse(url, self.rules)
            addresses = checked_addresses(target, self.rules, self._resolver)
            return self._post(target, _Pinned(addresses, deadline), message, secrets)
        except (BadTarget, TargetNotAllowed) as refused:
            return Outcome(None, str(refused))
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            if time.monotonic() >= deadline:
                return Outcome(None, f"no answer within {self._timeout_s:g} s")
            return Outcome(None, _short(error))

    def _post(self, target: httpx.URL, backend: _Pinned, message: Message, secrets: list[str]) -> Outcome:
        sent = [
            ("Host", target.netloc.decode("ascii")),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(message.body))),
            ("User-Agent", f"unshard/{program_version()}"),
            ("Connection", "close"),
            *headers(message, secrets, int(time.time())),
        ]
        url = httpcore.URL(scheme=target.raw_scheme, host=target.raw_host, port=target.port, target=target.raw_path)
        with httpcore.ConnectionPool(ssl_context=self._ssl_context, network_backend=backend) as pool:
            timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout_s)
            with (
                backend.watched(),
                pool.stream("POST", url, headers=sent, content=message.body, extensions={"timeout": timeouts}) as got,
            ):
                with suppress(httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
                    _drain(got)
                return _outcome(got)


class _Pinned(httpcore.NetworkBackend):
    """Connects to addresses that were checked, whatever the name in the URL resolves to by now."""

    def __init__(self, addresses: list[str], deadline: float) -> None:
        self._addresses = addresses
        self._deadline = deadline
        self._plain = httpcore.SyncBackend()
        self._watch: threading.Timer | None = None
        self._line: socket.socket | None = None

    def connect_tcp(
        self,
        host: str,  # noqa: ARG002 - its addresses are known
        port: int,
        timeout: float | None = None,  # noqa: ARG002 - the deadline is for all addresses together
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that answers."""
        *others, last = self._addresses
        for address in others:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                # Half of what is left, so that one that swallows packets leaves time for the next.
                return self._connect(address, port, self._left() / 2, local_address, socket_options)
        return self._connect(last, port, self._left(), local_address, socket_options)

    def _connect(self, address: str, port: int, timeout: float, *options: Any) -> httpcore.NetworkStream:
        stream = self._plain.connect_tcp(address, port, timeout, *options)
        self._end_in_time(stream.get_extra_info("socket"))
        return stream

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.01)

    def _end_in_time(self, connection: socket.socket) -> None:
        """Timeouts count from byte to byte; a receiver that drips them is cut off at the deadline as well."""
        line = connection.dup()  # TLS takes the descriptor over

        def cut() -> None:
            with suppress(OSError), line:
                line.shutdown(socket.SHUT_RDWR)

        self._watch = threading.Timer(self._left(), cut)
        self._watch.daemon = True
        self._line = line
        self._watch.start()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Stop watching when the block ends."""
        try:
            yield
        finally:
            if self._watch is not None and self._line is not None:
                self._watch.cancel()
                self._watch.join()
                self._line.close()


def _drain(answer: httpcore.Response) -> None:
    """Take some of the answer, so that a well-behaved receiver is not cut off while it writes."""
    taken = 0
    for chunk in answer.iter_stream():
        taken += len(chunk)
        if taken > MOST_ANSWER_BYTES:
            return


def _outcome(answer: httpcore.Response) -> Outcome:
    status = answer.status
    if 200 <= status < 300:
        return Outcome(status, None)
    if 300 <= status < 400:
        return Outcome(status, f"answered {status}: redirects are not followed, so give the final address")
    return Outcome(status, f"answered {status}", _retry_after(answer) if status in ASKS_TO_WAIT else 0.0)


def _retry_after(answer: httpcore.Response) -> float:
    """Seconds that the receiver wants to be left alone, at most a day; 0 when it says nothing that can be read."""
    text = next((value for name, value in answer.headers if name.lower() == b"retry-after"), b"").decode("latin-1")
    if text.strip().isascii() and text.strip().isdigit():
        return min(float(text), LONGEST_WAIT_S)
    with suppress(ValueError):
        moment = email.utils.parsedate_to_datetime(text)
        zoned: datetime = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return min(max((zoned - now()).total_seconds(), 0.0), LONGEST_WAIT_S)
    return 0.0


def _short(error: Exception) -> str:
    """What broke, on one line; without addresses, which these errors do not name."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MOST_ERROR_LENGTH]
