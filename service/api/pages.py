"""The pages for people: static files that talk to ``/v1`` like any other client."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.errors import Problem

router = APIRouter(include_in_schema=False)

DASHBOARD = Path(__file__).parent.parent / "dashboard"
KINDS = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
VIEWS = (
    "/",
    "/jobs",
    "/jobs/{_}",
    "/new",
    "/checkpoint",
    "/batches",
    "/batches/{_}",
    "/watches",
    "/workers",
    "/settings",
)
"""Addresses of the one page, which then shows what the address says; ``dashboard/pages.js`` has the same."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is sent. Browsers keep it and ask whether it is still the same."""

    content: bytes
    packed: bytes
    kind: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> Self:
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, mtime=0), KINDS[path.suffix], etag)

    def answer(self, request: Request) -> Response:
        headers = {"Cache-Control": "no-cache", "ETag": self.etag, "Vary": "Accept-Encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, media_type=self.kind, headers={**headers, "Content-Encoding": "gzip"})
        return Response(self.content, media_type=self.kind, headers=headers)


FILES = {
    path.relative_to(DASHBOARD).as_posix(): _File.read(path)
    for path in sorted(DASHBOARD.rglob("*"))
    if path.suffix in KINDS
}
"""Only what is there at start is served, by its exact name: no path is ever built from a request."""


def dashboard(request: Request) -> Response:
    """Show jobs, or whatever else the address says."""
    return FILES["index.html"].answer(request)


@router.get("/v1/docs")
def docs(request: Request) -> Response:
    """Show the API."""
    return FILES["docs.html"].answer(request)


@router.get("/favicon.ico")
def icon(request: Request) -> Response:
    """Give browsers the icon that they ask for."""
    return FILES["icon.svg"].answer(request)


@router.get("/static/{name:path}")
def static(name: str, request: Request) -> Response:
    """Give a file of the pages."""
    if name not in FILES:
        raise Problem("not-found", "there is no such file", hint="The dashboard is at /.")
    return FILES[name].answer(request)


for _view in VIEWS:
    router.add_api_route(_view, dashboard, methods=["GET"])
