#!/usr/bin/env bash
# Installs the oldest or the newest versions of all dependencies that pyproject.toml admits into an environment outside
# the checkout, and runs the fast tests there. Usage: bash tests/versions.sh oldest|newest [PYTHON] [tests ...]
#
# uv (from PyPI) computes the versions. oldest: each direct dependency at its lower bound, what they need at its newest.
# A bound that no set of versions can meet ends the run with uv's reason. The wheels of torch on PyPI bring gigabytes of
# CUDA:
#   UV_TORCH_BACKEND=cpu          takes torch from PyTorch's own index, without CUDA
#   TORCH=2.13.0 FIND=/my/wheels  takes another version, from a folder of wheels too; the run then says so
#   PLACE=/some/folder            keeps the environment there; else it is removed
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
mode=${1:-}
case "$mode" in
oldest) resolution=lowest-direct ;;
newest) resolution=highest ;;
*) echo "'$mode': give oldest or newest" >&2 && exit 2 ;;
esac
shift
python=$(command -v "${1:-python3}")
shift || true
place=${PLACE:-$(mktemp -d)}
[ -n "${PLACE:-}" ] || trap 'rm -rf "$place"' EXIT
mkdir -p "$place"
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
beside = ("captum", "nnsight", "playwright", "pyright", "pytorch-lightning", "ruff", "torchinfo")
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
