#!/usr/bin/env bash
# Make .venv-lm-eval with lm-evaluation-harness beside the packages of .venv: scripts/setup-lm-eval.sh
# Does nothing if it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.4.13
place=.venv-lm-eval
stamp=$place/installed-$version
[ ! -f "$stamp" ] || exit 0
echo "Installing lm-eval $version into $place" >&2
rm -rf "$place"
.venv/bin/python -m venv "$place"
purelib() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
realpath "$(purelib .venv)" > "$(purelib $place)/of-venv.pth"
"$place/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "lm-eval[hf]==$version" >&2
touch "$stamp"
