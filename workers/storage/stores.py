"""Builds obstore's clients from a location and a profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, S3Store

from workers.errors import InternalError, InvalidOption
from workers.storage.addresses import Location
from workers.storage.profiles import Limits, Profile

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Credential


def build_store(location: Location, profile: Profile, secrets: Mapping[str, str]) -> ObjectStore:
    """A client of the location's bucket; sends no request."""
    options: Any = {"client_options": _client_options(profile), "retry_config": _retries(profile.limits)}
    settings: Any = dict(profile.settings)
    others: Any = {**settings, **secrets}
    if location.scheme == "s3":
        return S3Store(location.bucket, **options, **_s3_settings(settings, secrets))
    if location.scheme == "gs":
        return GCSStore(location.bucket, **options, **others)
    if location.scheme == "az":
        return AzureStore(location.bucket, **options, **others)
    raise InternalError(f"there is no client for {location.scheme}://")


def _s3_settings(settings: dict[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    # The store refuses a part or object that was damaged on its way. CRC-64 costs next to nothing.
    settings.setdefault("checksum_algorithm", os.environ.get("AWS_CHECKSUM_ALGORITHM", "CRC64NVME"))
    if settings["checksum_algorithm"] == "none":
        del settings["checksum_algorithm"]
    if secrets:
        # Not as plain settings: those would be mixed with a session token from the environment, and be pickled.
        settings["credential_provider"] = _static_credential(secrets)
    return settings


def _static_credential(secrets: Mapping[str, str]) -> Any:
    def provide() -> S3Credential:
        return {
            "access_key_id": secrets["access_key_id"],
            "secret_access_key": secrets["secret_access_key"],
            "token": secrets.get("session_token"),
            "expires_at": None,
        }

    return provide


def _client_options(profile: Profile) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": profile.allow_http,
        "connect_timeout": timedelta(seconds=profile.limits.connect_timeout_s),
        "timeout": timedelta(seconds=profile.limits.request_timeout_s),
    }
    if profile.proxy_url is not None:
        options["proxy_url"] = profile.proxy_url
    if profile.root_certificate_file is not None:
        try:
            options["root_certificate"] = Path(profile.root_certificate_file).read_bytes()
        except OSError as error:
            path = profile.root_certificate_file
            raise InvalidOption(f"storage profile {profile.name!r}: {path}: {error.strerror}") from None
    return options


def _retries(limits: Limits) -> RetryConfig:
    longest = min(5, limits.retry_timeout_s / 4)
    return {
        "max_retries": int(limits.max_retries),
        "retry_timeout": timedelta(seconds=limits.retry_timeout_s),
        # Each pause is random between the first one and three times the last: about 2 s in the middle of a run.
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=longest), "base": 3},
    }
