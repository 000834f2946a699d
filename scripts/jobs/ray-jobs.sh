#!/usr/bin/env bash
# Calibrate on a Ray cluster: a job for each part of the text, then one that joins them.
#     MODEL=org/name DATA=calib.jsonl OUT=/shared/calibration SHARDS=4 ray-jobs.sh
# OUT is a folder that all nodes see; run it again to continue after a failure.
set -euo pipefail
: "${MODEL:?}" "${DATA:?}" "${OUT:?}" "${SHARDS:=4}" "${GPUS:=1}"

jobs=()
for part in $(seq "$SHARDS"); do
    id=fp8calib-$part-$(date +%s)
    ray job submit --no-wait --submission-id "$id" --entrypoint-num-gpus "$GPUS" -- \
        fp8calib calibrate "$MODEL" --data "$DATA" --shard "$part/$SHARDS" \
        --out "$OUT/shard-$part" --resume "$@"
    jobs+=("$id")
done
for id in "${jobs[@]}"; do
    ray job logs --follow "$id" >&2
    status=$(ray job status "$id" 2>&1)
    [[ ${status,,} == *succeeded* ]] || { echo "$status" >&2 && exit 1; }
done
ray job submit -- fp8calib merge "$OUT"/shard-* --out "$OUT/stats.safetensors" --force
