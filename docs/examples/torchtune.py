"""After torchtune: every epoch becomes a model, each read back before it counts as done.

    torchtune.py /runs/llama3-sft /models/llama3-sft

Epoch 2 becomes /models/llama3-sft/epoch_2. The status is 0 only when all succeeded.
"""

import os
import sys

from service.client import Client

run, models = sys.argv[1:]
with Client(os.environ.get("UNSHARD_SERVER", "http://127.0.0.1:8000"), os.environ.get("UNSHARD_TOKEN")) as unshard:
    batch = unshard.create(
        "batches",
        {
            "discover": {"prefix": run, "pattern": "epoch_*"},
            "template": {
                "destination": f"{models}/{{name}}",
                "options": {"verify": "reread"},
                "labels": {"trainer": "torchtune"},
            },
        },
    )
    jobs = [unshard.wait(job["id"]) for job in unshard.all_jobs(batch_id=batch["id"])]

for job in jobs:
    print(job["source"], job["state"], (job["error"] or {}).get("message", ""))
sys.exit(any(job["state"] != "succeeded" for job in jobs))
