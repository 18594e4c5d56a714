"""Settings, and what is refused before the first request."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError

from service.cli.serving import run_serve
from service.jobs.addresses import AllowedPlaces, NotAllowed
from service.server import serve
from service.settings import Settings
from tests.service.conftest import TOKEN
from workers.errors import InvalidOption, StorageError


def test_settings_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("UNSHARD_PORT", "9000")
    monkeypatch.setenv("UNSHARD_ALLOWED_SOURCES", "s3://runs/team-a, /data")
    monkeypatch.setenv("UNSHARD_ALLOWED_DESTINATIONS", '["s3://models"]')
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    settings = Settings(data_dir=tmp_path)
    assert settings.port == 9000
    assert settings.allowed_sources == ("s3://runs/team-a", "/data")
    assert settings.allowed_destinations == ("s3://models",)
    assert settings.ray_address == "head:6379"
    assert settings.effective_database_url == f"sqlite:///{tmp_path}/unshard.db"
    monkeypatch.setenv("UNSHARD_RAY_ADDRESS", "other:6379")
    assert Settings().ray_address == "other:6379"
    assert Settings(ray_address="named:1").ray_address == "named:1"


def test_data_lives_in_the_users_data_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Settings().data_dir == tmp_path / "unshard"


def test_a_token_never_shows(monkeypatch):
    monkeypatch.setenv("UNSHARD_ADMIN_TOKEN", TOKEN)
    assert TOKEN not in f"{Settings()!r} {Settings()} {Settings().model_dump_json()}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_token(host):
    Settings(host=host).check_may_listen()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_other_hosts_are_refused_without_a_token(host):
    with pytest.raises(InvalidOption, match="without a token") as caught:
        serve(Settings(host=host))
    assert "UNSHARD_ADMIN_TOKEN" in caught.value.hint
    Settings(host=host, admin_token=TOKEN).check_may_listen()


def test_a_token_that_can_be_guessed_is_refused():
    with pytest.raises(InvalidOption, match="shorter than 16"):
        Settings(admin_token="hunter2").check_may_listen()


def test_the_command_refuses_with_status_1_and_says_what_to_do():
    command = [sys.executable, "-m", "service.cli", "serve", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "without a token" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named(settings):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(settings.model_copy(update={"port": port}))


def test_nonsense_is_refused():
    for wrong in ({"port": 70000}, {"max_concurrent_jobs": 0}, {"lease_s": 0}):
        with pytest.raises(ValidationError):
            Settings(**wrong)


@pytest.fixture
def places(tmp_path):
    (tmp_path / "allowed" / "run").mkdir(parents=True)
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "allowed" / "escape").symlink_to(tmp_path / "secret")
    (tmp_path / "way-in").symlink_to(tmp_path / "allowed")
    return AllowedPlaces("source", (str(tmp_path / "allowed"), "s3://runs/team"))


def test_what_is_below_a_prefix_is_allowed(places, tmp_path):
    assert places.check(f"{tmp_path}/allowed/run/") == f"{tmp_path}/allowed/run"
    assert places.check(f"file://{tmp_path}/allowed/run") == f"{tmp_path}/allowed/run"
    assert places.check(f"{tmp_path}/way-in/run") == f"{tmp_path}/allowed/run"
    assert places.check("s3://runs/team/a/") == "s3://runs/team/a"


@pytest.mark.parametrize(
    "address",
    [
        "{}/secret",
        "{}/allowed/../secret",
        "{}/allowed/escape",
        "{}/allowed/escape/deeper",
        "{}/allowed-too",
        "file://{}/allowed/%2e%2e/secret",
        "/",
        "s3://runs/team-b",
        "s3://runs",
        "s3://other/team",
        "gs://runs/team",
    ],
)
def test_what_is_outside_is_not(places, tmp_path, address):
    with pytest.raises(NotAllowed):
        places.check(address.format(tmp_path))


@pytest.mark.parametrize("address", ["run", "./run", "~/run", "s3://runs/team/../x", "ftp://x/y", "s3://k:s@runs/x"])
def test_what_is_no_clear_address_is_refused(places, address):
    with pytest.raises(InvalidOption):
        places.check(address)


def test_no_prefixes_allow_everything(tmp_path):
    assert AllowedPlaces("source").check(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("content", [None, "[profiles", "[profiles.lab]\nscheme = 'ftp'"])
def test_a_service_does_not_start_with_storage_profiles_that_are_none(tmp_path, monkeypatch, content):
    file = tmp_path / "profiles.toml"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("UNSHARD_STORAGE_PROFILES", str(file))
    monkeypatch.setattr("service.cli.serving.serve", lambda _: pytest.fail("it started"))
    with pytest.raises(InvalidOption, match="storage profile"):
        run_serve({"data_dir": tmp_path})
