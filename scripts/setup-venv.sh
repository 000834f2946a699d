#!/usr/bin/env bash
# Make .venv and install the package from the clone with one extra: scripts/setup-venv.sh demo|test|docs
# Does nothing if .venv already has what pyproject.toml and constraints.txt require.
# For the demo, an fp8calib that a user installed into .venv without -e stays as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=$1
python=.venv/bin/python
stamp=.venv/installed-$extra

# The path of the clone is included: after a move, the editable install points to a missing folder.
wanted=$({ pwd; cat pyproject.toml constraints.txt; } | cksum)
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

is_usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13; do
        if is_usable "$name"; then
            echo "$name"
            return
        fi
    done
    echo "Found no Python 3.11 or newer that can make virtual environments" >&2
    echo "(tried python3, python3.11, python3.12 and python3.13)." >&2
    echo "Install one: on Debian and Ubuntu the packages python3 and python3-venv." >&2
    return 1
}

if ! is_usable "$python"; then
    base=$(find_python)
    echo "Making .venv with $("$base" --version)" >&2
    "$base" -m venv --clear .venv
elif ! "$python" -m pip --version >/dev/null 2>&1; then
    # Making it was interrupted, or another tool made it.
    "$python" -m ensurepip >&2
fi

is_plain_install() {
    "$python" -I -c 'import importlib.metadata as m, json, sys
found = [d.read_text("direct_url.json") or "{}" for d in m.distributions(name="fp8calib")]
is_editable = any(json.loads(text).get("dir_info", {}).get("editable") for text in found)
sys.exit(not found or is_editable)'
}

list_extra() {
    "$python" -c 'import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"][sys.argv[1]], sep="\n")' "$extra"
}

echo "Installing fp8calib[$extra] into .venv (once; takes some minutes)" >&2
quiet=--quiet
if [ -t 2 ]; then
    quiet=
fi
pip_install() {
    "$python" -m pip install $quiet --no-input --disable-pip-version-check "$@" >&2
}
if [ "$extra" = demo ] && is_plain_install; then
    mapfile -t requirements < <(list_extra)
    pip_install "${requirements[@]}"
else
    # torch first and alone: otherwise another package could select a different, larger build.
    pip_install -c constraints.txt torch
    pip_install -c constraints.txt -e ".[$extra]"
fi
echo "$wanted" >"$stamp"
