"""At the end of a Megatron-LM run: convert the newest iteration, showing how it goes.

    megatron.py /runs/gpt s3://models/gpt /models/tokenizer-and-config

For a training loop that runs on asyncio: the coroutine takes no thread while the service works.
"""

import asyncio
import os
import sys

from service.client import AsyncClient


async def convert(save: str, destination: str, config_dir: str) -> str:
    """The state that the job ended in."""
    server = os.environ.get("UNSHARD_SERVER", "http://127.0.0.1:8000")
    async with AsyncClient(server, os.environ.get("UNSHARD_TOKEN")) as unshard:
        options = {"config_dir": config_dir}
        job = await unshard.submit(save, destination, options, labels={"trainer": "megatron"}, if_done="return")
        async for event in unshard.follow(job["id"]):
            print(event["type"], event["data"].get("bytes_done", ""))
        return (await unshard.job(job["id"]))["state"]


sys.exit(asyncio.run(convert(*sys.argv[1:])) != "succeeded")
