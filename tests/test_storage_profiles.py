import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.seaweed import S3Server, free_ports, open_s3_folder
from workers.errors import InvalidOption, StorageError, UnshardError
from workers.storage import FolderAddress, load_profiles, open_folder


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the file of storage profiles and name it in the environment."""

    def write(text: str) -> None:
        path = tmp_path / "profiles.toml"
        path.write_text(text)
        monkeypatch.setenv("UNSHARD_STORAGE_PROFILES", str(path))

    return write


DEAD = 'scheme = "s3"\nendpoint = "{endpoint}"\nallow_http = true\nregion = "us-east-1"\nretry_timeout_s = 2\n'
KEYS = 'access_key_id_env = "CANARY_ID"\nsecret_access_key_env = "CANARY"\n'
CANARY = "c4n4ry-secret"


def everything_shown(error: UnshardError) -> str:
    text = "".join(traceback.format_exception(error))
    return f"{text}{error!r}{error.hint}{error.details()}{pickle.dumps(error)!r}"


@pytest.mark.parametrize("action", ["list", "read", "write", "exists", "stream"])
def test_wrong_credentials_are_named_and_never_shown(
    s3: S3Server, profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    profiles("[profiles.wrong]\n" + DEAD.format(endpoint=s3.endpoint) + KEYS)
    monkeypatch.setenv("CANARY_ID", s3.access_key)
    monkeypatch.setenv("CANARY", CANARY)
    folder = open_folder(FolderAddress(f"s3://{s3.bucket}/x", "wrong"))
    actions = {
        "list": folder.list,
        "read": lambda: folder.read("f"),
        "write": lambda: folder.write("f", b"x"),
        "exists": folder.exists,
        "stream": lambda: folder.write_stream("f", [b"x"], 1),
    }
    with pytest.raises(StorageError, match=f"s3://{s3.bucket}/x.*refused access.*403") as caught:
        actions[action]()
    assert "profile 'wrong'" in caught.value.hint
    for shown in (everything_shown(caught.value), repr(folder), str(vars(folder)), repr(pickle.dumps(folder))):
        assert CANARY not in shown
    assert all(CANARY not in f"{profile!r}{pickle.dumps(profile)!r}" for profile in load_profiles().values())


def test_a_profile_with_files_and_variables_opens_the_store_whatever_the_environment_says(
    s3: S3Server, profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(s3.secret_key + "\n")
    profiles(
        f"[profiles.good]\n{DEAD.format(endpoint=s3.endpoint)}"
        f'access_key_id_env = "GOOD_ID"\nsecret_access_key_file = "{tmp_path}/key"\nchecksum = "SHA256"\n'
        f'prefixes = ["s3://{s3.bucket}/allowed"]\n'
    )
    monkeypatch.setenv("GOOD_ID", s3.access_key)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another")
    folder = open_folder(FolderAddress(f"s3://{s3.bucket}/allowed/a", "good"))
    folder.write_stream("f", [b"abc"], 3)
    assert folder.read("f") == b"abc"
    with pytest.raises(InvalidOption, match="does not allow"):
        open_folder(FolderAddress(f"s3://{s3.bucket}/allowed-not", "good"))
    with pytest.raises(InvalidOption, match="is for s3"):
        open_folder(FolderAddress("/etc", "good"))


def test_a_missing_bucket_is_told_from_a_missing_file(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    open_s3_folder(s3, monkeypatch)
    folder = open_folder("s3://no-such-bucket/x")
    for attempt in (lambda: folder.read("f"), folder.list, folder.exists):
        with pytest.raises(StorageError, match="no such bucket"):
            attempt()


@pytest.mark.parametrize("action", ["list", "read", "write"])
def test_a_dead_endpoint_is_reported_in_bounded_time(
    profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    profiles("[profiles.dead]\n" + DEAD.format(endpoint=endpoint) + KEYS)
    monkeypatch.setenv("CANARY_ID", "id")
    monkeypatch.setenv("CANARY", CANARY)
    folder = open_folder(FolderAddress("s3://bucket/x", "dead"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://bucket/x.*endpoint cannot be reached") as caught:
        {"list": folder.list, "read": lambda: folder.read("f"), "write": lambda: folder.write("f", b"")}[action]()
    assert time.monotonic() - began < 15
    assert CANARY not in everything_shown(caught.value)


def test_plain_http_needs_to_be_allowed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    open_s3_folder(s3, monkeypatch)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StorageError, match="only https") as caught:
        open_folder(f"s3://{s3.bucket}/x").list()
    assert "allow_http" in caught.value.hint


def test_a_profile_confines_folders_and_their_links(tmp_path: Path, profiles: Callable[[str], None]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "leak").symlink_to(tmp_path / "secret")
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    (tmp_path / "secret").write_bytes(b"x")
    profiles(f'[profiles.data]\nscheme = "file"\nprefixes = ["{tmp_path}/in"]')
    with pytest.raises(InvalidOption, match="does not allow"):
        open_folder(FolderAddress(f"{tmp_path}/in/../other", "data"))
    folder = open_folder(FolderAddress(f"{tmp_path}/in/", "data"))
    for attempt in (
        lambda: folder.read("leak"),
        lambda: folder.stat("leak"),
        lambda: folder.write("up/x", b""),
        lambda: folder.list("up"),
    ):
        with pytest.raises(StorageError, match="leads out of the folders"):
            attempt()
    folder.write("fine", b"")


def test_an_unknown_profile_is_refused_with_the_known_ones(profiles: Callable[[str], None]) -> None:
    profiles('[profiles.b]\nscheme = "gs"\n[profiles.a]\nscheme = "memory"')
    with pytest.raises(InvalidOption, match="no storage profile 'c'") as caught:
        open_folder(FolderAddress("memory://x", "c"))
    assert "a, b" in caught.value.hint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('scheme = "ftp"', "needs a scheme"),
        (f'scheme = "s3"\nsecret_access_key = "{CANARY}"', "may not stand in the file itself"),
        (f'scheme = "s3"\nsecret_key = "{CANARY}"', "secret_key is unknown"),
        ('scheme = "s3"\naccess_key_id_env = "X"', "together"),
        ('scheme = "s3"\nconnect_timeout_s = 0', "connect_timeout_s cannot be 0"),
        ('scheme = "s3"\nprefixes = ["/etc"]', "every prefix has to be a s3:// URL"),
        ('scheme = "s3"\nprefixes = "s3://b"', "list of URLs"),
        ('scheme = "s3"\nproxy_url = 1', "proxy_url is a text"),
        (f'scheme = "s3"\n{KEYS}', "environment variable CANARY"),
        ('scheme = "az"\naccount_key_file = "/nowhere"', "file /nowhere is missing"),
        ('scheme = "s3"\nroot_certificate_file = "/nowhere"', "/nowhere: No such file"),
        ("scheme =", "cannot be read"),
        ('scheme = "az"', "cannot be opened: .*Account must be specified"),
    ],
)
def test_a_faulty_profile_is_refused_with_a_reason(
    profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, table: str, said: str
) -> None:
    for name in ("CANARY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    profiles(f"[profiles.p]\n{table}")
    scheme = "az" if '"az"' in table else "s3"
    with pytest.raises(InvalidOption, match=said) as caught:
        open_folder(FolderAddress(f"{scheme}://bucket/x", "p"))
    assert CANARY not in everything_shown(caught.value)
