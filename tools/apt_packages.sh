#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the missing Debian packages of apt-packages.txt, which some tests need, as root; otherwise prints them.
# Fails only under CI=true, where a test without its tool fails as well (`require_tool` in tests/conftest.py).
set -eu

LIST=${1:-$(dirname -- "$0")/apt-packages.txt}
packages=$(sed 's/#.*//' "$LIST" | tr -s ' \t\n' '   ')
[ -n "${packages# }" ] || exit 0

missing=""
for package in $packages; do
    case $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true) in
        *" installed") ;;
        *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'set-up: installing Debian packages:%s\n' "$missing" >&2
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; }
    # Package lists of a fresh container are empty, and those of an old one outdated: try, update, try again.
    if install 2>/dev/null || { apt-get update -qq && install; }; then exit 0; fi
    printf 'set-up: apt-get could not install:%s; tests that need them are skipped\n' "$missing" >&2
else
    printf 'set-up: not installed, so tests that need them are skipped:%s (apt-get install%s)\n' "$missing" "$missing" >&2
fi
[ "${CI:-}" != true ]
