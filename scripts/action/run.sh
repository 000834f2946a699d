#!/usr/bin/env bash
# Check and gate what action.yml names; the results are in $RUNNER_TEMP/fp8calib, whatever they say.
set -euo pipefail
out=$RUNNER_TEMP/fp8calib
rm -rf "$out"
mkdir -p "$out"

# keep NAME COMMAND...: keep what a command prints and its exit code.
keep() {
    local name=$1 code=0
    shift
    "$@" --json >"$out/$name.json" || code=$?
    echo "$code" >"$out/$name.code"
}

# Statistics are no scales that an engine loads: only the gate is about them.
if [ "$(basename "$SUBJECT")" != stats.safetensors ] && [ ! -f "$SUBJECT/stats.safetensors" ]; then
    asked=()
    for engine in $ENGINES; do asked+=(--engine "$engine"); done
    if [ -f "$SUBJECT" ] && [ -n "$MODEL" ]; then asked+=(--model "$MODEL"); fi
    keep check fp8calib check "$SUBJECT" "${asked[@]}"
elif [ -z "$GATE" ]; then
    echo "::error::$SUBJECT holds statistics: name a gate" && exit 2
fi
if [ -n "$GATE" ]; then
    [ -n "$MODEL" ] || { echo "::error::a gate needs the unquantized model" && exit 2; }
    data=()
    if [ -n "$DATA" ]; then data=(--data "$DATA"); fi
    read -r -d "" -a options <<<"$OPTIONS" || true  # of all lines; the end is no zero byte
    rm -f "$RECEIPT"
    keep verify fp8calib verify "$MODEL" --scales "$SUBJECT" --gate "$GATE" "${data[@]}" \
        --receipt "$RECEIPT" "${options[@]}"
fi
