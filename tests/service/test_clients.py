"""Both clients: they have the same methods, and each gets the same answers from a real service."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from service.calls import path_of
from service.client import ApiError, AsyncClient, Client, Unreachable
from workers.errors import InvalidOption

ENDS = ("/in", "/out")


def methods(client: type) -> dict[str, list[str]]:
    public = {name: made for name, made in vars(client).items() if not name.startswith("_")}
    return {name: list(inspect.signature(made).parameters) for name, made in public.items()}


def test_both_clients_have_the_same_methods_with_the_same_parameters():
    assert methods(Client) == methods(AsyncClient)
    assert len(methods(Client)) > 25


def test_the_client_for_asyncio_hands_in_follows_and_lists(service):
    async def work():
        async with AsyncClient(service.url) as client:
            assert await client.ready()
            job = await client.submit(*ENDS, labels={"run": "a"}, idempotency_key="k")
            assert (await client.submit(*ENDS, labels={"run": "a"}, idempotency_key="k"))["id"] == job["id"]
            followed = [event["type"] async for event in client.follow(job["id"])]
            done = await client.wait(job["id"], timeout_s=15)
            assert (followed[0], followed[-1], done["state"]) == ("job.created", "job.succeeded", "succeeded")
            assert [one["id"] async for one in client.all_jobs(labels={"run": "a"})] == [job["id"]]
            assert [shard["path"] async for shard in client.shards(job["id"])] == ["model.safetensors"]
            assert [tensor["name"] async for tensor in client.tensors(job["id"])] == ["a.weight", "b.weight"]
            assert [attempt["outcome"] for attempt in await client.attempts(job["id"])] == ["succeeded"]
            assert (await client.plan(job["id"]))["fingerprint"] == "f"
            assert (await client.events(job["id"]))[0]["type"] == "job.created"
            with pytest.raises(ApiError, match="is succeeded"):
                await client.retry(job["id"])
            await client.delete(job["id"])
            with pytest.raises(ApiError, match="there is no job"):
                await client.job(job["id"])
        with pytest.raises(Unreachable):
            await AsyncClient("nowhere").job("job_0")

    asyncio.run(work())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_clients_tell_of_batches_and_watches(service, tmp_path, asynchronous):
    batch_of = {"items": [{"source": "/in", "destination": "/a"}, {"source": "/in", "destination": "relative"}]}
    watch_of = {"prefix": str(tmp_path), "pattern": "step_*", "template": {"destination": "/models/{name}"}}

    async def work():
        async with AsyncClient(service.url) as client:
            made = await client.create("batches", batch_of)
            watch = await client.create("watches", watch_of)
            items = [item async for item in client.batch_items(made["id"])]
            seen = [item async for item in client.watch_items(watch["id"])]
            return await client.batch(made["id"]), items, await client.watch(watch["id"]), seen

    def work_in_a_thread():
        client = service.client
        made, watch = client.create("batches", batch_of), client.create("watches", watch_of)
        items, seen = list(client.batch_items(made["id"])), list(client.watch_items(watch["id"]))
        return client.batch(made["id"]), items, client.watch(watch["id"]), seen

    batch, items, watch, seen = asyncio.run(work()) if asynchronous else work_in_a_thread()
    assert (batch["counts"]["total"], batch["counts"]["refused"]) == (2, 1)
    assert [item["position"] for item in items] == [0, 1]
    assert (watch["prefix"], watch["counts"]["waiting"], seen) == (str(tmp_path), 0, [])


@pytest.mark.parametrize("identifier", ["", "..", "job_1/plan", "job_1?x=1", "job_1:cancel", "job 1", "jöb"])
def test_what_can_be_no_id_makes_no_path(identifier):
    with pytest.raises(InvalidOption, match="is no id of one of the jobs") as refused:
        path_of("jobs", identifier, "plan")
    assert refused.value.found == identifier
    assert path_of("jobs", "job_0661", "plan") == "/v1/jobs/job_0661/plan"
