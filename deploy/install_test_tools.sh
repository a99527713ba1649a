#!/bin/sh
# Debian packages that some tests need: a C compiler, the openssl command, an OCI runtime, PostgreSQL, Chromium, libraries of
# Mooncake, promtool, systemd-analyze. Tests whose packages are missing are skipped.
missing=""
command -v gcc >/dev/null || command -v cc >/dev/null || missing="$missing gcc libc6-dev"
command -v openssl >/dev/null || missing="$missing openssl"
command -v crun >/dev/null || command -v runc >/dev/null || missing="$missing crun"
command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || missing="$missing chromium"
ls /usr/lib*/libibverbs.so.1 /usr/lib/*/libibverbs.so.1 2>/dev/null | grep -q . || missing="$missing libibverbs1"
command -v promtool >/dev/null || missing="$missing prometheus"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	echo "Installing Debian packages:$missing ..."
	export DEBIAN_FRONTEND=noninteractive
	# shellcheck disable=SC2086  # several names
	{ apt-get -qq update && apt-get -qq install -y --no-install-recommends $missing; } >/dev/null 2>&1 && exit 0
fi
echo "Not on this machine, so their tests are skipped:$missing (as root: apt-get install$missing)"
