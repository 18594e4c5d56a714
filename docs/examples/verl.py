"""After a verl step is saved: convert it while the training goes on.

    verl.py /runs/qwen/global_step_120 s3://models/qwen/step-120

Hands the job in and returns at once; the service works on its own cluster. Calling it again for the same step, after a
restart of the training for instance, makes nothing twice.
"""

import os
import sys

from service.client import Client

step, destination = sys.argv[1:]
with Client(os.environ.get("UNSHARD_SERVER", "http://127.0.0.1:8000"), os.environ.get("UNSHARD_TOKEN")) as unshard:
    job = unshard.submit(
        step,
        destination,
        {"dtype": "bfloat16", "role": "actor"},
        labels={"trainer": "verl"},
        idempotency_key=f"{step} to {destination}",
    )
print(job["id"], job["state"])
