"""Folders that hold far more than any checkpoint: they are told, and neither memory nor time goes without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.seaweed import S3Server
from workers.errors import StorageError
from workers.storage import TooManyFiles, open_folder
from workers.storage import object_store as module

PAGE = 100


@dataclass
class Endless:
    """A bucket whose listing has no end."""

    url: str = "s3://endless/prefix"
    pages: int = 0


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endless]:
    bucket = Endless()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            bucket.pages += 1
            keys = (f"prefix/{bucket.pages:09}-{number}" for number in range(PAGE))
            made = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag><Size>1</Size>"
            objects = "".join(f"<Contents><Key>{key}</Key>{made}</Contents>" for key in keys)
            more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{bucket.pages}</NextContinuationToken>"
            told = f"<ListBucketResult>{more}{objects}</ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        for name, value in S3Server(f"http://127.0.0.1:{server.server_address[1]}").environment().items():
            monkeypatch.setenv(name, value)
        yield bucket
        server.shutdown()


def test_folders_beside_objects_without_end_are_not_waited_for_and_no_more_is_asked(endless, monkeypatch):
    monkeypatch.setattr(module, "_LEVEL_S", 0.5)
    folder = open_folder(endless.url)
    with pytest.raises(StorageError, match=r"could not be listed within 0\.5 s") as caught:
        folder.subfolders()
    assert endless.url in caught.value.message
    assert "name a folder below it" in caught.value.hint
    asked = endless.pages
    assert asked > 1
    threading.Event().wait(0.5)
    assert endless.pages <= asked + 1, "what was given up goes on"
    folder.close()


def test_files_of_a_bucket_are_listed_up_to_a_number(endless):
    folder = open_folder(endless.url)
    with pytest.raises(TooManyFiles, match="holds more than 1,000 files"):
        folder.list(most=1000)
    assert endless.pages < 100
    folder.close()


@pytest.mark.parametrize("most", [2, 3, None])
def test_files_of_a_disk_are_listed_up_to_a_number(tmp_path, most):
    for name in "abc":
        (tmp_path / name).touch()
    folder = open_folder(str(tmp_path))
    if most == 2:
        with pytest.raises(TooManyFiles, match="holds more than 2 files") as caught:
            folder.list(most=most)
        assert caught.value.hint
    else:
        assert [entry.path for entry in folder.list(most=most)] == ["a", "b", "c"]
