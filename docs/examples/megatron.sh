#!/bin/sh
# Before Megatron-LM starts: watch its --save folder. Each iteration becomes a model once it is complete and nobody writes
# to it any more; nothing more is to be done at the end of the run.
#   megatron.sh /runs/gpt s3://models/gpt /models/tokenizer-and-config
set -eu
save=$1 models=$2 config=$3
server=${UNSHARD_SERVER:-http://127.0.0.1:8000}

curl --silent --show-error --fail-with-body "$server/v1/watches" \
  ${UNSHARD_TOKEN:+--header "Authorization: Bearer $UNSHARD_TOKEN"} --header 'Content-Type: application/json' \
  --header "Idempotency-Key: watch $save" \
  --data "{
    \"name\": \"megatron $save\", \"prefix\": \"$save\", \"pattern\": \"iter_*\", \"interval_s\": 60,
    \"template\": {\"destination\": \"$models/{name}\", \"options\": {\"config_dir\": \"$config\"}, \"labels\": {\"trainer\": \"megatron\"}}
  }"
