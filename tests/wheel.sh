#!/usr/bin/env bash
# Builds the sdist, and the wheel from it; asks twine about both, and weighs the wheel. Installs the wheel into a fresh
# environment outside the checkout, runs the README's lines there with nothing else installed, and then the tests: what a
# user gets, not what happens to lie in the working tree. What builds has an environment of its own. Usage: tests/wheel.sh PYTHON
set -euo pipefail
python=$(command -v "$1")
checkout=$(pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/builder"
builder="$place/builder/bin/python"
"$builder" -m pip install --quiet --disable-pip-version-check -c "$checkout/constraints.txt" build hatchling twine
"$builder" -m build --no-isolation --outdir "$place/dist" "$checkout" >"$place/build.log" || { cat "$place/build.log"; exit 1; }
"$builder" -m twine check --strict "$place"/dist/*
wheel=$(ls "$place"/dist/*.whl)
size=$(stat -c %s "$wheel")
echo "the wheel has $size bytes"
test "$size" -lt 12000000 || { echo "it is to stay under 12 MB"; exit 1; }
"$python" -m venv "$place/venv"
pip=("$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$checkout/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" "$wheel"
mkdir "$place/readme"
(cd "$place/readme" && "$place/venv/bin/python" "$checkout/tests/readme_lines.py" "$checkout/README.md" >"$place/readme.log" 2>&1) || {
	cat "$place/readme.log"
	exit 1
}
"${pip[@]}" "$wheel[dev]"
mkdir "$place/elsewhere"
cp -r "$checkout/tests" "$checkout/demos" "$checkout/README.md" "$checkout/pyproject.toml" "$checkout/Makefile" "$checkout/constraints.txt" "$checkout/.ci" "$checkout/.github" "$place/elsewhere/"
mkdir "$place/elsewhere/hooks" && cp "$checkout/hooks/README.md" "$place/elsewhere/hooks/"
cd "$place/elsewhere"
"$place/venv/bin/python" -c "import crate_interp, sys; sys.exit('$checkout' in crate_interp.__file__)"
# two processes of one thread each: on two cores half the time of one process of two threads
OMP_NUM_THREADS=1 "$place/venv/bin/python" -m pytest -n 2 --dist loadgroup
