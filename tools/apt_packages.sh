#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Sees to the Debian packages in apt-packages.txt, which some tests need: installs what is missing where it may, names it otherwise.
# Fails only under CI=true, where a test that lacks its tool is a failure as well (`require_tool` in tests/conftest.py).
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
    # The lists of a fresh container are empty and those of an old one stale: try, update, try again.
    if install 2>/dev/null || { apt-get update -qq && install; }; then exit 0; fi
    printf 'set-up: apt-get could not install:%s; the tests that need them skip\n' "$missing" >&2
else
    printf 'set-up: not installed, so the tests that need them skip:%s (apt-get install%s)\n' "$missing" "$missing" >&2
fi
[ "${CI:-}" != true ]
