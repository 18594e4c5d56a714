"""The application: routes, checks and the parts behind them, put together from settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from service import errors, schemas
from service.access.guard import Guard
from service.api import (
    audit,
    batches,
    events,
    jobs,
    looking,
    overview,
    pages,
    parts,
    system,
    tokens,
    watches,
    webhooks,
)
from service.api.context import Context, spelled_job
from service.api.events import told_batch
from service.batches.keeper import Keeper
from service.batches.store import BatchStore
from service.db.database import Database
from service.jobs.addresses import Places
from service.jobs.changes import Changes
from service.jobs.cluster import Conversions, GivenConversions, RayConversions
from service.jobs.parts import JobParts
from service.jobs.planning import Planner, PlanningLimits
from service.jobs.retention import Janitor, Retention
from service.jobs.runner import Runner, Tools
from service.jobs.store import JobStore
from service.metrics import Metrics
from service.security import Gate
from service.settings import Settings
from service.watches.store import WatchStore
from service.watches.watcher import Watcher
from service.webhooks.hooks import Hooks
from workers.convert import Result
from workers.manifest import program_version

RunConversion = Callable[..., Result]


def create_app(settings: Settings, *, run_conversion: RunConversion | None = None) -> FastAPI:
    """An application that works when its lifespan runs.

    ``run_conversion`` stands in for ``workers.convert.convert`` on the Ray cluster, with the same arguments.
    """
    context = _context(settings, run_conversion)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(_start, context)
        try:
            yield
        finally:
            await run_in_threadpool(_stop, context)

    app = FastAPI(
        title="unshard",
        version=program_version(),
        summary="Training checkpoints to Hugging Face models.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
    )
    app.state.context = context
    for routes in (jobs, parts, events, batches, watches, looking, system, overview, webhooks, tokens, audit, pages):
        app.include_router(routes.router)
    errors.install(app)
    app.add_middleware(Gate, settings=settings, guard=context.guard)
    _complete_schema(app, asks_for_token=settings.admin_token is not None)
    return app


def _context(settings: Settings, run_conversion: RunConversion | None) -> Context:
    places = Places.of(
        settings.allowed_sources,
        settings.allowed_destinations,
        # Who asks for a token has callers who are not the user of this machine.
        only_listed_local=settings.admin_token is not None,
    )
    planner = Planner(
        PlanningLimits(
            settings.planning_timeout_s,
            settings.inspect_timeout_s,
            settings.planning_memory_bytes,
            within=places.sources.roots,
        )
    )
    conversions: Conversions = (
        GivenConversions(run_conversion) if run_conversion else RayConversions(settings, planner)
    )
    database = Database(settings.effective_database_url)
    batch_store = BatchStore(database)
    store = JobStore(database)
    metrics = Metrics(store)
    runner = Runner(Tools(database, conversions, places, metrics), settings)
    return Context(
        settings=settings,
        database=database,
        guard=Guard(settings, database),
        store=store,
        parts=JobParts(database),
        places=places,
        planner=planner,
        janitor=Janitor(database, _retention(settings)),
        conversions=conversions,
        runner=runner,
        metrics=metrics,
        hooks=Hooks.of(settings, database, metrics.deliveries),
        changes=Changes(database, spelled_job, partial(told_batch, batch_store)),
        batches=batch_store,
        keeper=Keeper(database, settings.poll_s),
        watches=WatchStore(database),
        watcher=Watcher.of(database, places, planner, runner, settings.poll_s),
    )


def _retention(settings: Settings) -> Retention:
    return Retention(
        jobs=timedelta(days=settings.keep_jobs_days),
        events=timedelta(days=settings.keep_events_days),
        audit=timedelta(days=settings.keep_audit_days),
    )


def _start(context: Context) -> None:
    sole = context.database.own()
    context.database.migrate()
    context.conversions.start()
    context.runner.start(sole=sole)
    context.janitor.start()
    context.hooks.deliverer.start()
    context.keeper.start()
    context.watcher.start()


def _stop(context: Context) -> None:
    """End what runs by itself, all of it at once: together they take no longer than the slowest does."""
    with ExitStack() as stack:
        for close in (context.database.close, context.guard.close, context.conversions.close):
            stack.callback(close)
        ways: tuple[Callable[[], None], ...] = (
            partial(_end_jobs, context),
            context.watcher.stop,
            context.keeper.stop,
            context.janitor.stop,
            context.hooks.deliverer.stop,
        )
        with ThreadPoolExecutor(len(ways), "stop") as pool:
            ending = [pool.submit(stop) for stop in ways]
        for ended in ending:
            ended.result()


def _end_jobs(context: Context) -> None:
    """Give jobs back, and only then end what plans them: else they would fail by it."""
    context.runner.stop()
    context.planner.close()


def _complete_schema(app: FastAPI, *, asks_for_token: bool) -> None:
    """Put the one form of errors into the schema, where routes only refer to it."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        models = document.setdefault("components", {}).setdefault("schemas", {})
        template = "#/components/schemas/{model}"
        problem = schemas.ProblemDocument.model_json_schema(ref_template=template)
        models.update(problem.pop("$defs", {}))
        models["ProblemDocument"] = problem
        if asks_for_token:
            document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
