#!/usr/bin/env bash
# Make .venv-peers (llm-compressor and ModelOpt), .venv-auto-round or .venv-quark:
# scripts/setup-peers.sh peers|auto-round|quark
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=.venv-$1
torch=torch==2.13.0
# Quark needs another version of transformers than llm-compressor, which needs an older auto-round.
case "$1" in
    peers) packages=(llmcompressor==0.14.0.1 nvidia-modelopt==0.47.0) ;;
    auto-round) packages=(auto-round==0.16.1 compressed-tensors==0.19.0 transformers==5.17.0) ;;
    quark) packages=(amd-quark==0.13 transformers==5.16.1 accelerate) ;;
esac
if [ -e "$folder/installed" ]; then
    exit 0
fi

echo "Making $folder with ${packages[*]} (once; takes some minutes)" >&2
base=.venv/bin/python
[ -x "$base" ] || base=python3
"$base" -m venv --clear "$folder"
pip_install() {
    "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@" >&2
}
# torch first and alone: otherwise another package could select a different build.
pip_install "$torch"
pip_install "$torch" "${packages[@]}"
touch "$folder/installed"
