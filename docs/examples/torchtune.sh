#!/bin/sh
# After torchtune: the newest complete epoch becomes a model, with the base model's tokenizer and config.
#   torchtune.sh /runs/llama3-sft /models/llama3-sft [/models/Meta-Llama-3-8B]
# output_dir of the recipe is the first argument. Waits for the end; the status is the job's.
set -eu
run=$1 model=$2 base=${3:-}
server=${UNSHARD_SERVER:-http://127.0.0.1:8000}

options='{}'
if [ -n "$base" ]; then options="{\"config_dir\": \"$base\"}"; fi
job=$(curl --silent --show-error --fail-with-body "$server/v1/jobs?wait=120s" \
  ${UNSHARD_TOKEN:+--header "Authorization: Bearer $UNSHARD_TOKEN"} --header 'Content-Type: application/json' \
  --header "Idempotency-Key: $run $(stat --format %Y "$run")" \
  --data "{\"source\": \"$run\", \"destination\": \"$model\", \"options\": $options, \"labels\": {\"trainer\": \"torchtune\"}}")
echo "$job"
case $job in *'"state":"succeeded"'*) ;; *) exit 1 ;; esac
