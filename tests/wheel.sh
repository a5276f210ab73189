#!/usr/bin/env bash
# Builds the sdist, and the wheel from it; asks twine about both, and weighs the wheel. Installs the wheel into two fresh
# environments outside the checkout: in one it runs the README's lines with nothing else installed, in the other the tests.
# So a run sees what a user gets, not what happens to lie in the working tree. What builds has an environment of its own.
# Installations and the README's lines run side by side, because each of them keeps one core busy. Usage: tests/wheel.sh PYTHON
set -euo pipefail
python=$(command -v "$1")
checkout=$(pwd)
unset PYTHONDONTWRITEBYTECODE # pip compiles nothing here, so that the first import of a module has to keep what it compiled
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
install() { # ENVIRONMENT PACKAGES...
	"$place/$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$checkout/constraints.txt" "${@:2}"
}
with_torch() {
	"$python" -m venv "$place/$1" && install "$1" torch
}

bash "$checkout/tests/install_chromium.sh" &
browser=$!
with_torch readme &
alone=$!
with_torch venv &
both=$!
"$python" -m venv "$place/builder"
install builder build hatchling twine
"$place/builder/bin/python" -m build --no-isolation --outdir "$place/dist" "$checkout" >"$place/build.log" || { cat "$place/build.log"; exit 1; }
"$place/builder/bin/python" -m twine check --strict "$place"/dist/*
wheel=$(ls "$place"/dist/*.whl)
size=$(stat -c %s "$wheel")
echo "the wheel has $size bytes"
test "$size" -lt 12000000 || { echo "it is to stay under 12 MB"; exit 1; }

wait $alone
install readme "$wheel"
mkdir "$place/elsewhere" "$place/empty"
(cd "$place/empty" && "$place/readme/bin/python" "$checkout/tests/readme_lines.py" "$checkout/README.md" >"$place/readme.log" 2>&1) &
lines=$!
wait $both
install venv "$wheel[dev]"
cp -r "$checkout/tests" "$checkout/demos" "$checkout/README.md" "$checkout/pyproject.toml" "$checkout/Makefile" "$checkout/constraints.txt" "$checkout/.ci" "$checkout/.github" "$place/elsewhere/"
mkdir "$place/elsewhere/hooks" && cp "$checkout/hooks/README.md" "$place/elsewhere/hooks/"
wait $browser
wait $lines || { cat "$place/readme.log"; exit 1; }
cd "$place/elsewhere"
"$place/venv/bin/python" -c "import crate_interp, sys; sys.exit('$checkout' in crate_interp.__file__)"
# two processes of one thread each: on two cores half the time of one process of two threads
OMP_NUM_THREADS=1 "$place/venv/bin/python" -m pytest -n 2 --dist loadgroup --max-worker-restart 0
