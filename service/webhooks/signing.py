"""Signatures by which a receiver knows that a delivery is ours and fresh, after Standard Webhooks.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md: the header
``webhook-signature`` has ``v1,<base64>`` for each valid secret, of HMAC-SHA256 over ``<id>.<timestamp>.<body>``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "whsec_"
SECRET_BYTES = 32
"""The specification asks for 24 to 64."""


@dataclass(frozen=True, slots=True)
class Message:
    """A delivery on its way: its id, which stays over all attempts, and its body as it is sent."""

    id: str
    body: bytes


def new_secret() -> str:
    """A secret as it is shown once to whoever is to check signatures."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message: Message, timestamp: int) -> str:
    """The signature of a message that is sent at a time, in seconds since 1970."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = b"%b.%d.%b" % (message.id.encode(), timestamp, message.body)
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def headers(message: Message, secrets_: Sequence[str], timestamp: int) -> list[tuple[str, str]]:
    """The three headers of a delivery, signed with each secret that is valid now."""
    return [
        ("webhook-id", message.id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", " ".join(signature(secret, message, timestamp) for secret in secrets_)),
    ]
