#!/usr/bin/env bash
# Installs Debian's Chromium for the tests of pages if there is no browser and we may: as root, or in CI by sudo without a
# password. Where it cannot, it says so in a line: these tests then skip, or fail if CRATE_BROWSER=required. It always
# exits 0, so that the other tests run.
for name in chromium chromium-browser google-chrome chrome; do
	if command -v "$name" >/dev/null; then exit 0; fi
done
in_ci=$([ "${CRATE_BROWSER:-}" = required ] && echo yes)
log=$(mktemp)
apt_get() {
	"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y \
		-o Acquire::Retries=1 -o Acquire::http::Timeout=30 "$@" >>"$log" 2>&1
}
reason=
as_root=()
if ! command -v apt-get >/dev/null; then
	reason="there is no apt-get"
elif [ "$(id -u)" != 0 ]; then
	as_root=(sudo -n)
	[ "$in_ci" ] && sudo -n true 2>/dev/null || reason="only root may install packages"
fi
if [ ! "$reason" ] && ! apt_get install chromium; then
	# the lists of packages may be old or missing
	apt_get update && apt_get install chromium || reason="apt-get: $(tail -n 1 "$log")"
fi
rm -f "$log"
if [ "$reason" ]; then
	echo "Chromium is missing ($reason): tests of pages $([ "$in_ci" ] && echo fail || echo skip). Type: apt-get install chromium"
fi
exit 0
