#!/bin/sh
# After verl: every global_step_* of a run becomes a model, those that are there already are skipped.
#   verl.sh /runs/qwen s3://models/qwen
# trainer.default_local_dir is the first argument; the actor of step 120 becomes s3://models/qwen/step-120.
set -eu
run=$1 models=$2
server=${UNSHARD_SERVER:-http://127.0.0.1:8000}

ask() { curl --silent --show-error --fail-with-body ${UNSHARD_TOKEN:+--header "Authorization: Bearer $UNSHARD_TOKEN"} "$@"; }
field() { sed -n "s/.*\"$1\":\"\\([^\"]*\\)\".*/\\1/p" | head -n 1; }

batch=$(ask "$server/v1/batches" --header 'Content-Type: application/json' --data "{
  \"discover\": {\"prefix\": \"$run\", \"pattern\": \"global_step_*\"},
  \"template\": {\"destination\": \"$models/step-{step}\", \"options\": {\"dtype\": \"bfloat16\"}, \"labels\": {\"trainer\": \"verl\"}}
}" | field id)
echo "batch $batch: $server/#/batches/$batch"

while state=$(ask "$server/v1/batches/$batch" | field state); [ "$state" = running ]; do sleep 1; done
failed=$(ask "$server/v1/jobs?batch_id=$batch&state=failed" | grep -c '"id":"job_' || true)
[ "$state" = completed ] && [ "$failed" = 0 ]
