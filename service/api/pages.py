"""The pages for people: static files that talk to ``/v1`` like any other client."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

DASHBOARD = Path(__file__).parent.parent / "dashboard"
KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {path.name: path for path in DASHBOARD.iterdir() if path.suffix in KINDS}
"""Only what is there at start is served, by its exact name: no path is ever built from a request."""


def _page(name: str) -> FileResponse:
    path = FILES[name]
    return FileResponse(path, media_type=KINDS[path.suffix], headers={"Cache-Control": "no-cache"})


@router.get("/")
def dashboard() -> FileResponse:
    """Show the jobs."""
    return _page("index.html")


@router.get("/v1/docs")
def docs() -> FileResponse:
    """Show the API."""
    return _page("docs.html")


@router.get("/favicon.ico")
def icon() -> FileResponse:
    """Give browsers the icon that they ask for."""
    return _page("icon.svg")


for _name in FILES:
    router.add_api_route(f"/static/{_name}", lambda name=_name: _page(str(name)), methods=["GET"])
