"""Storage profiles: endpoints, credentials and limits that an administrator sets on the server by name.

They are read from the TOML file that ``UNSHARD_STORAGE_PROFILES`` names, for example::

    [profiles.lab]
    scheme = "s3"
    endpoint = "http://storage.lab:9000"
    allow_http = true
    region = "us-east-1"
    access_key_id_env = "LAB_KEY_ID"
    secret_access_key_file = "/run/secrets/lab"
    prefixes = ["s3://checkpoints/team-a"]

A secret is only ever referred to, by the name of an environment variable (``_env``) or of a file (``_file``), and
is looked up when a folder is opened: a ``Profile`` itself holds none. What a profile leaves out, the client takes
from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``); an access key and its session token go together, though.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.errors import InvalidOption
from workers.storage.addresses import Location

PROFILES_VARIABLE = "UNSHARD_STORAGE_PROFILES"

Setting = str | bool | int | float

# Names as people write them -> obstore's names.
_SETTINGS: dict[str, dict[str, str]] = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "checksum": "checksum_algorithm",
        "virtual_hosted_style": "virtual_hosted_style_request",
        "anonymous": "skip_signature",
        "request_payer": "request_payer",
        "server_side_encryption": "server_side_encryption",
        "sse_kms_key_id": "sse_kms_key_id",
        "sse_bucket_key_enabled": "sse_bucket_key_enabled",
        "conditional_put": "conditional_put",
        "disable_bulk_delete": "disable_bulk_delete",
        "unsigned_payload": "unsigned_payload",
        "role_arn": "role_arn",
        "web_identity_token_file": "web_identity_token_file",
    },
    "gs": {"base_url": "base_url", "service_account_file": "service_account", "anonymous": "skip_signature"},
    "az": {
        "account_name": "account_name",
        "endpoint": "endpoint",
        "client_id": "client_id",
        "tenant_id": "tenant_id",
        "authority_host": "authority_host",
        "federated_token_file": "federated_token_file",
        "use_azure_cli": "use_azure_cli",
        "use_emulator": "use_emulator",
        "anonymous": "skip_signature",
    },
    "file": {},
    "memory": {},
}
_SECRETS: dict[str, dict[str, str]] = {
    "s3": {
        "access_key_id": "access_key_id",
        "secret_access_key": "secret_access_key",
        "session_token": "session_token",
    },
    "gs": {"service_account_key": "service_account_key"},
    "az": {"account_key": "account_key", "sas_token": "sas_key", "client_secret": "client_secret"},
    "file": {},
    "memory": {},
}
_LIMITS = ("connect_timeout_s", "request_timeout_s", "retry_timeout_s", "max_retries", "upload_concurrency")
_COMMON = ("scheme", "prefixes", "allow_http", "proxy_url", "root_certificate_file", *_LIMITS)
_ENVIRONMENT_SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a store may take, in seconds, and how much an upload may hold in memory.

    A request that the store fails or does not answer is tried again until ``retry_timeout_s`` have passed since its
    first try, at most ``max_retries`` times: a store may restart meanwhile, and a dead endpoint is reported after
    about that time. ``request_timeout_s`` covers one request with its body: a part of 16 MiB passes at 140 KB/s.
    """

    connect_timeout_s: float = 5
    request_timeout_s: float = 120
    retry_timeout_s: float = 30
    max_retries: int = 20
    upload_concurrency: int = 4

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < (name != "max_retries"):
                raise InvalidOption(f"a storage profile's {name} cannot be {value!r}")


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where a secret is found: the name of an environment variable or of a file, never the secret."""

    kind: str
    name: str

    def read(self, profile: str | None) -> str:
        """Look the secret up; surrounding white space in a file is dropped."""
        try:
            value = (
                os.environ[self.name] if self.kind == "env" else Path(self.name).read_text(encoding="utf-8").strip()
            )
        except (KeyError, OSError, UnicodeDecodeError):
            value = ""
        if not value:
            what = "environment variable" if self.kind == "env" else "file"
            raise InvalidOption(
                f"storage profile {profile!r}: the {what} {self.name} is missing, unreadable or empty",
                hint="Set it in the environment of the server and of its workers.",
            )
        return value


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings to open folders with. ``name`` None stands for the environment alone."""

    name: str | None
    scheme: str
    prefixes: tuple[Location, ...] = ()
    limits: Limits = Limits()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By obstore's names."""
    secret_sources: Mapping[str, SecretSource] = field(default_factory=dict)
    allow_http: bool = False
    proxy_url: str | None = None
    root_certificate_file: str | None = None

    def secrets(self) -> dict[str, str]:
        """Look up every secret, by obstore's names. Keep the answer out of anything that is printed or sent."""
        return {key: source.read(self.name) for key, source in self.secret_sources.items()}

    def check_allows(self, location: Location) -> None:
        """``InvalidOption`` unless the location is of this profile's scheme and inside one of its prefixes."""
        if location.scheme != self.scheme:
            raise InvalidOption(f"storage profile {self.name!r} is for {self.scheme}://, not for {location.url}")
        if self.prefixes and not any(location.is_inside(prefix) for prefix in self.prefixes):
            allowed = ", ".join(prefix.url for prefix in self.prefixes)
            raise InvalidOption(
                f"storage profile {self.name!r} does not allow {location.url}", hint=f"It allows: {allowed}."
            )


def environment_profile(scheme: str) -> Profile:
    """The profile of an address that names none: the client's own reading of the environment."""
    prefix = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}.get(scheme, "")
    # Our client options replace the ones that obstore would read from the environment, this one included.
    allowed = os.environ.get(f"{prefix}_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on")
    return Profile(None, scheme, allow_http=allowed)


def environment_secrets() -> tuple[str, ...]:
    """Secrets that the client may have taken from the environment, so that errors can be cleaned of them."""
    return tuple(value for name in _ENVIRONMENT_SECRETS if (value := os.environ.get(name)))


def find_profile(name: str, location: Location) -> Profile:
    """The profile of this name, if it allows the location."""
    profiles = load_profiles()
    if name not in profiles:
        known = ", ".join(sorted(profiles)) or f"none; {PROFILES_VARIABLE} names the file that holds them"
        raise InvalidOption(f"there is no storage profile {name!r}", hint=f"The profiles are: {known}.")
    profiles[name].check_allows(location)
    return profiles[name]


def load_profiles() -> dict[str, Profile]:
    """All profiles of this server by name; none when ``UNSHARD_STORAGE_PROFILES`` is not set."""
    path = os.environ.get(PROFILES_VARIABLE)
    if not path:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidOption(
            f"the storage profiles in {path} cannot be read: {reason}",
            hint=f"{PROFILES_VARIABLE} names the file: correct it, or the file.",
        ) from None
    tables = document.get("profiles", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidOption(f"{path} does not hold [profiles.NAME] tables")
    return {name: parse_profile(name, table) for name, table in tables.items()}


def parse_profile(name: str, table: Mapping[str, object]) -> Profile:
    """Check one table of the file; its values are not repeated in errors, since one may be a misplaced secret."""
    scheme = table.get("scheme")
    if not isinstance(scheme, str) or scheme not in _SETTINGS:
        raise InvalidOption(f"storage profile {name!r} needs a scheme: one of {', '.join(_SETTINGS)}")
    settings: dict[str, Setting] = {}
    sources: dict[str, SecretSource] = {}
    for key, value in table.items():
        base, _, kind = key.rpartition("_")
        if key in _SETTINGS[scheme] and isinstance(value, str | bool):
            settings[_SETTINGS[scheme][key]] = value
        elif kind in ("env", "file") and base in _SECRETS[scheme] and isinstance(value, str):
            sources[_SECRETS[scheme][base]] = SecretSource(kind, value)
        elif key not in _COMMON:
            raise _unknown_key(name, scheme, key)
    if scheme == "s3" and bool(sources) and not {"access_key_id", "secret_access_key"} <= sources.keys():
        raise InvalidOption(f"storage profile {name!r} needs access_key_id and secret_access_key together")
    return Profile(
        name,
        scheme,
        prefixes=_prefixes(name, scheme, table.get("prefixes", [])),
        limits=Limits(**{key: table[key] for key in _LIMITS if key in table}),  # type: ignore[arg-type]
        settings=settings,
        secret_sources=sources,
        allow_http=table.get("allow_http") is True,
        proxy_url=_text(name, table, "proxy_url"),
        root_certificate_file=_text(name, table, "root_certificate_file"),
    )


def _prefixes(name: str, scheme: str, value: object) -> tuple[Location, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidOption(f"storage profile {name!r}: prefixes is a list of URLs")
    locations = tuple(Location.parse(item) for item in value)
    if any(location.scheme != scheme for location in locations):
        raise InvalidOption(f"storage profile {name!r}: every prefix has to be a {scheme}:// URL")
    return locations


def _text(name: str, table: Mapping[str, object], key: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidOption(f"storage profile {name!r}: {key} is a text")
    return value


def _unknown_key(name: str, scheme: str, key: str) -> InvalidOption:
    if key in _SECRETS[scheme]:
        hint = f"Write {key}_env with the name of an environment variable, or {key}_file with that of a file."
        return InvalidOption(f"storage profile {name!r}: {key} may not stand in the file itself", hint=hint)
    known = sorted([*_COMMON, *_SETTINGS[scheme], *(f"{secret}_env" for secret in _SECRETS[scheme])])
    hint = f"Known are: {', '.join(known)}."
    return InvalidOption(f"storage profile {name!r}: {key} is unknown or has the wrong type", hint=hint)
