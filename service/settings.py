"""Settings of the service, from ``UNSHARD_*`` variables or from whoever starts it."""

from __future__ import annotations

import ipaddress
import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from workers.errors import InvalidOption


def _data_home() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "unshard"


def _split(value: Any) -> Any:
    """``a, b`` or a JSON list, as an environment variable spells several values."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


Several = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Everything that an administrator can set. Without any, the service is for this machine alone."""

    model_config = SettingsConfigDict(env_prefix="UNSHARD_", frozen=True, extra="ignore", populate_by_name=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes any free port."""
    data_dir: Path = Field(default_factory=_data_home)
    database_url: str | None = None
    """None: an SQLite file in ``data_dir``."""
    ray_address: str | None = Field(
        default=None, validation_alias=AliasChoices("UNSHARD_RAY_ADDRESS", "RAY_ADDRESS", "ray_address")
    )
    """None: a cluster of its own on this machine."""
    mergers: Annotated[int, Field(ge=1)] | None = None
    """None: as many as the cluster has room for."""
    merger_cpus: Annotated[float, Field(ge=0)] = 1.0
    merger_gpus: Annotated[float, Field(ge=0)] = 0.0
    admin_token: SecretStr | None = None
    """Who shows it may do everything. None: no token is asked for, and only loopback is listened on."""
    allowed_sources: Several = ()
    """Paths and URLs below which jobs may read.

    None given: everywhere that the service itself may; with a token, no folder of this machine and all of buckets.
    """
    allowed_destinations: Several = ()
    allowed_hosts: Several = ()
    """Names, besides loopback's, under which browsers and clients may address the service."""
    max_concurrent_jobs: Annotated[int, Field(ge=1)] = 2
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts of a job whose process is lost each time."""
    lease_s: Annotated[float, Field(gt=0)] = 30.0
    poll_s: Annotated[float, Field(gt=0)] = 0.5
    job_timeout_s: Annotated[float, Field(gt=0)] | None = None
    planning_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """For a job's source to be read as far as its metadata goes."""
    inspect_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """The same for what a request waits for: inspections and dry runs."""
    compare_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """For two checkpoints to be compared; what was not compared by then is told."""
    compare_bytes: Annotated[int, Field(ge=0)] = 8 * 2**30
    """Of either of two checkpoints whose values are compared; of larger ones only the metadata are."""
    planning_memory_bytes: Annotated[int, Field(ge=2**28)] | None = None
    """Of each process that reads metadata. None: what the machine has."""
    cluster_wait_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long a job waits for a cluster that does not work before it fails."""
    keep_jobs_days: Annotated[float, Field(gt=0)] = 90.0
    """Finished jobs."""
    keep_events_days: Annotated[float, Field(gt=0)] = 30.0
    """Events of finished jobs, and webhook deliveries that have ended."""
    keep_audit_days: Annotated[float, Field(gt=0)] = 365.0
    webhook_allow_http: bool = False
    """Also send webhooks unencrypted."""
    webhook_allowed_networks: Networks = ()
    """Networks, such as 10.1.0.0/16, that webhooks may go to besides public addresses."""
    min_watch_interval_s: Annotated[float, Field(gt=0)] = 5.0
    requests_per_minute: Annotated[int, Field(ge=1)] | None = 3000
    """Of each token that has no limit of its own; the local user has none."""
    failed_logins_per_minute: Annotated[int, Field(ge=1)] = 20
    """Wrong tokens that may come from one address."""
    max_streams: Annotated[int, Field(ge=1)] = 20
    """Event streams that a token may have open."""
    trusted_proxies: Several = ()
    """Addresses and networks whose headers X-Forwarded-For and X-Forwarded-Proto are believed."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 2**20
    max_batch_bytes: Annotated[int, Field(ge=1024)] = 2**24
    """Of the body that makes a batch: 10,000 items with paths of several hundred characters."""
    max_json_depth: Annotated[int, Field(ge=4)] = 32

    @property
    def effective_database_url(self) -> str:
        """The database, whether it was named or not."""
        return self.database_url or f"sqlite:///{self.data_dir.expanduser().absolute()}/unshard.db"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach what listens on ``host``."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def check_may_listen(self) -> None:
        """Refuse to be reachable by others without a token."""
        token = self.admin_token.get_secret_value() if self.admin_token else None
        if token is None and not self.is_loopback:
            raise InvalidOption(
                f"the service may not listen on {self.host} without a token: whoever reaches it could read and write "
                "files as this user",
                hint="Set UNSHARD_ADMIN_TOKEN to a long random text, or listen on 127.0.0.1.",
            )
        if token is not None and len(token) < MINIMUM_TOKEN_LENGTH:
            raise InvalidOption(
                f"UNSHARD_ADMIN_TOKEN is shorter than {MINIMUM_TOKEN_LENGTH} characters",
                hint="Make one with: openssl rand -hex 32",
            )


MINIMUM_TOKEN_LENGTH = 16
