#!/usr/bin/env bash
# Installs some versions of all dependencies into an environment outside the checkout, and runs the fast tests there.
# Usage: bash tests/versions.sh oldest|newest|pinned|torchvision [PYTHON] [tests ...]
#        bash tests/versions.sh pythons [tests ...]
#
# pinned: the versions of constraints.txt. pythons: these with each Python of pyenv from 3.11 on, and a line of counts
# for each. torchvision: these with another torch, beside torchvision; it runs tests/real_torchvision.py.
# oldest, newest: what pyproject.toml admits, computed by uv (from PyPI). oldest: each direct dependency at its lower
# bound, what they need at its newest. A bound that no set of versions can meet ends the run with uv's reason.
# The wheels of torch on PyPI bring gigabytes of CUDA. For oldest and newest:
#   UV_TORCH_BACKEND=cpu          takes torch from PyTorch's own index, without CUDA
#   TORCH=2.13.0 FIND=/my/wheels  takes another version, from a folder of wheels too; the run then says so
# TMPDIR=/some/folder makes the environments there, PLACE=/some/folder keeps one; else they are removed.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
mode=${1:-}
case "$mode" in
oldest) resolution=lowest-direct ;;
newest) resolution=highest ;;
pinned) torch=(torch) tests=tests ;;
torchvision) torch=(torch==2.14.1 torchvision==0.29.1) tests=tests/real_torchvision.py ;;
pythons) ;;
*) echo "'$mode': give oldest, newest, pinned, torchvision or pythons" >&2 && exit 2 ;;
esac
shift

if [ "$mode" = pythons ]; then
    command -v pyenv >/dev/null || { echo "skipped: pyenv is not installed, so there is no choice of Pythons" && exit; }
    counts=$(mktemp) failed=0
    trap 'rm "$counts"' EXIT
    for python in "$(pyenv root)"/versions/3.*/bin/python; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        free=$(df --output=avail -BG "$(dirname "$counts")" | tail -1 | tr -dc 0-9)
        if [ "$free" -lt 12 ]; then
            echo "skipped: $free GB are free, and an environment takes up to 12"
        else
            bash "$0" pinned "$python" "$@"
        fi | tee -a /dev/stderr | tail -1 | sed "s/^/$("$python" --version): /" >>"$counts" || failed=1
    done
    cat "$counts"
    exit $failed
fi

python=$(command -v "${1:-python3}")
shift || true
place=${PLACE:-$(mktemp -d)}
[ -n "${PLACE:-}" ] || trap 'rm -rf "$place"' EXIT
mkdir -p "$place"

if [ -n "${torch:-}" ]; then
    cp "$checkout/constraints.txt" "$place/pins.txt"
    [ "$mode" = pinned ] || sed -i '/^torch==/d' "$place/pins.txt"
    "$python" -m venv "$place/venv"
    pip=("$place/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -c "$place/pins.txt")
    "${pip[@]}" "${torch[@]}"
    "${pip[@]}" --editable "$checkout[dev]"
    cd "$checkout"
    OMP_NUM_THREADS=1 "$place/venv/bin/python" -m pytest -q -p no:cacheprovider \
        -n 2 --dist loadgroup --max-worker-restart 0 "${@:-$tests}"
    exit
fi

"$python" -m venv "$place/uv"
"$place/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv
uv=("$place/uv/bin/uv")

"$place/uv/bin/python" - "$checkout/pyproject.toml" "$place" "$mode" "${TORCH:-}" <<'PYTHON'
import re, sys, tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
place, mode, torch = Path(sys.argv[2]), *sys.argv[3:]
bounds = dict(re.match(r"([\w-]+)>=([\w.]+)", text).groups() for text in project["dependencies"])
pinned = (bounds if mode == "oldest" else {}) | ({"torch": torch} if torch else {})
(place / "names.txt").write_text("".join(f"^{name}==\n" for name in bounds))
(place / "pinned.txt").write_text("".join(f"{name}=={pinned[name]}\n" for name in pinned))
# oldest: what only edits, draws, or trains beside the tests is left out
beside = ("captum", "nnsight", "playwright", "pyright", "pytorch-lightning", "ruff")
dev = project["optional-dependencies"]["dev"]
dev = [text for text in dev if mode == "newest" or not text.startswith(beside)]
(place / "dev.txt").write_text("\n".join(dev))
if torch:
    print(f"untested here: the {mode} torch that pyproject.toml admits; torch {torch} is in its place")
PYTHON

find=(${FIND:+--find-links "$FIND"})
"${uv[@]}" pip compile --quiet --python "$python" "${find[@]}" --resolution "$resolution" \
    --constraint "$place/pinned.txt" "$checkout/pyproject.toml" --output-file "$place/pins.txt" >/dev/null
"${uv[@]}" venv --quiet --allow-existing --python "$python" "$place/venv"
"${uv[@]}" pip install --quiet --python "$place/venv/bin/python" "${find[@]}" -r "$place/pins.txt"
"${uv[@]}" pip install --quiet --python "$place/venv/bin/python" "${find[@]}" -c "$place/pins.txt" -r "$place/dev.txt"
"${uv[@]}" pip install --quiet --python "$place/venv/bin/python" --no-deps --editable "$checkout" # its entry points
echo "installed: $(grep -f "$place/names.txt" "$place/pins.txt" | sed 's/==/ /' | paste -sd, | sed 's/,/, /g')"

# Older libraries warn of their own ways, and jaxtyping's plugin for pytest is newer than the oldest jaxtyping: no types
# are checked with the oldest.
lenient=(-o addopts="--import-mode=importlib --strict-markers" -W ignore::DeprecationWarning -W ignore::FutureWarning)
[ "$mode" = oldest ] || lenient=()
cd "$checkout"
OMP_NUM_THREADS=1 "$place/venv/bin/python" -m pytest -q -p no:cacheprovider \
    "${lenient[@]}" "${@:-tests}"
