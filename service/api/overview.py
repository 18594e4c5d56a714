"""``/v1/overview``: the service at a glance, for a first page and for whoever is new."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service.api.context import PROBLEMS, Context, Here, Reader
from service.jobs.addresses import NotAllowed
from workers.manifest import program_version
from workers.options import ConvertOptions

router = APIRouter(tags=["service"], responses=PROBLEMS)

DEMO = Path(__file__).parent.parent / "demo" / "checkpoint"
DEMO_MODEL = "qwen3-moe-demo"


class Demo(BaseModel):
    """A small checkpoint that comes with the service, and where a model of it may be put."""

    source: str
    destination: str


class Overview(BaseModel):
    """What there is."""

    version: str
    jobs: dict[str, int] = Field(description="How many of the caller's jobs are in each state that any of them is in.")
    demo: Demo | None = Field(description="null where the service may not read or write where it would have to.")


@router.get("/v1/overview")
def overview(here: Here, caller: Reader) -> Overview:
    """Count jobs by state, and name a checkpoint to try the service with."""
    return Overview(version=program_version(), jobs=here.store.counts(caller.only_owner), demo=_demo(here))


def _demo(here: Context) -> Demo | None:
    if not DEMO.is_dir():
        return None
    models = here.settings.data_dir.absolute() / "models"
    number, destination = 1, models / DEMO_MODEL
    while destination.exists():
        number += 1
        destination = models / f"{DEMO_MODEL}-{number}"
    try:
        source, target = here.places.check(str(DEMO), str(destination), ConvertOptions())
    except NotAllowed:
        return None
    return Demo(source=source, destination=target)
