"""Where webhooks may point: an address on the internet, or in a network that the administrator allows.

Whoever may make a webhook makes this service send requests. So its name is resolved here, every address that it has is
judged, and the connection goes to one of those very addresses (``service.webhooks.sending``): a name that resolves to
something else a moment later changes nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from workers.errors import InputError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], list[str]]
"""From a name and a port to addresses; raises ``OSError`` when there are none."""

MOST_URL_LENGTH = 2048

# IANA's registries of special-purpose addresses, and what is no unicast at all. Written out, since what Python's
# ``is_global`` covers changes between its releases. https://www.iana.org/assignments/iana-ipv4-special-registry
REFUSED_V4 = {
    "0.0.0.0/8": "of no host",
    "10.0.0.0/8": "private",
    "100.64.0.0/10": "behind a carrier's NAT",
    "127.0.0.0/8": "of this machine itself",
    "169.254.0.0/16": "link-local",
    "172.16.0.0/12": "private",
    "192.0.0.0/24": "reserved",
    "192.0.2.0/24": "for documentation",
    "192.88.99.0/24": "reserved",
    "192.168.0.0/16": "private",
    "198.18.0.0/15": "for benchmarks",
    "198.51.100.0/24": "for documentation",
    "203.0.113.0/24": "for documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
}
# Of IPv6 only 2000::/3 is global unicast; the kinds outside are named for messages.
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
REFUSED_V6 = {
    "::/128": "of no host",
    "::1/128": "of this machine itself",
    "fc00::/7": "private",
    "fe80::/10": "link-local",
    "fec0::/10": "private",
    "ff00::/8": "multicast",
    "2001::/23": "reserved",  # among them Teredo, which carries an IPv4 address
    "2001:db8::/32": "for documentation",
    "2002::/16": "6to4, which is abandoned and carries an IPv4 address",
    "3fff::/20": "for documentation",
}
REFUSED = tuple((ipaddress.ip_network(network), kind) for network, kind in (REFUSED_V4 | REFUSED_V6).items())
CARRIERS_OF_V4 = (
    ipaddress.IPv6Network("::ffff:0:0/96"),  # IPv4-mapped
    ipaddress.IPv6Network("64:ff9b::/96"),  # NAT64: on a network without IPv4 the way to public IPv4 addresses
)


class BadTarget(InputError):
    """A URL that no webhook can have, or whose name has no address."""

    code = "validation"

    def __init__(self, message: str) -> None:
        hint = "Give the full https URL that takes the deliveries, with a host that resolves."
        super().__init__(message, hint=hint)


class TargetNotAllowed(InputError):
    """A URL that leads to where webhooks may not go. The addresses are not told: they may be nobody's business."""

    code = "target-not-allowed"

    def __init__(self, message: str) -> None:
        hint = "Webhooks go to public addresses, and to the networks that UNSHARD_WEBHOOK_ALLOWED_NETWORKS lists."
        super().__init__(message, hint=hint)


@dataclass(frozen=True, slots=True)
class TargetRules:
    """What the administrator allows beyond https to public addresses."""

    allow_http: bool = False
    allowed_networks: tuple[Network, ...] = ()

    def refusal(self, address: Address) -> str | None:
        """Why requests may not go to an address, as "an address that is ..."; None when they may."""
        if any(address in network for network in self.allowed_networks if network.version == address.version):
            return None
        if isinstance(address, ipaddress.IPv6Address):
            if any(address in carrier for carrier in CARRIERS_OF_V4):
                return self.refusal(ipaddress.IPv4Address(address.packed[-4:]))
            outside = None if address in GLOBAL_V6 else "not public"
        else:
            outside = None
        kinds = (kind for network, kind in REFUSED if network.version == address.version and address in network)
        return next(kinds, outside)


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, as this machine resolves it."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse(url: str, rules: TargetRules) -> httpx.URL:
    """The parts of a webhook's URL, or ``BadTarget``. The URL itself is not repeated: it may hold a secret."""
    if len(url) > MOST_URL_LENGTH:
        raise BadTarget(f"the URL is longer than {MOST_URL_LENGTH} characters")
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        raise BadTarget("this is not a URL") from None
    if parts.scheme not in ("https", "http") or not parts.host:
        raise BadTarget("the URL has to begin with https:// and a host")
    if parts.scheme == "http" and not rules.allow_http:
        raise BadTarget("the URL has to be https: this service sends nothing unencrypted")
    if parts.userinfo:
        raise BadTarget("the URL may not hold a user or password: check the signature instead")
    if parts.fragment:
        raise BadTarget("the URL may not have a #fragment, which is never sent")
    if not 0 < port_of(parts) < 2**16:
        raise BadTarget(f"there is no port {parts.port}")
    return parts


def port_of(target: httpx.URL) -> int:
    """The port that a URL means."""
    return target.port if target.port is not None else {"https": 443, "http": 80}[target.scheme]


def checked_addresses(target: httpx.URL, rules: TargetRules, resolver: Resolver = resolve) -> list[str]:
    """The addresses that a connection for this URL may go to: all that its name has, each of them allowed.

    Raises ``TargetNotAllowed`` when one is not, and ``BadTarget`` when there are none.
    """
    try:
        # A name is sent to DNS as it goes into the request: encoded, should it have other letters than ASCII's.
        found = resolver(target.raw_host.decode("ascii"), port_of(target))
    except (OSError, UnicodeError):
        raise BadTarget("the host of the URL has no address") from None
    if not found:
        raise BadTarget("the host of the URL has no address")
    for text in found:
        refusal = rules.refusal(ipaddress.ip_address(text))
        if refusal is not None:
            raise TargetNotAllowed(f"the host of the URL has an address that is {refusal}")
    return found
