#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Names the missing Debian packages of apt-packages.txt, which some tests need; with --install it installs them, as root.
#
# `make test` only names them, `make tools` installs. CI installs by itself and fails without them, as a test without its tool does there
# (`require_tool` in tests/conftest.py).
set -eu

install=""
if [ "${1:-}" = --install ]; then install=yes; shift; fi
if [ "${CI:-}" = true ]; then install=yes; fi
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

if [ -z "$install" ]; then
    printf 'set-up: tests that need these Debian packages are skipped:%s. `make tools` installs them (a download of about 200 MB)\n' "$missing" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'set-up: installing Debian packages (a download of about 200 MB):%s\n' "$missing" >&2
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; }
    # Package lists of a fresh container are empty, and those of an old one outdated: try, update, try again.
    if install 2>/dev/null || { apt-get update -qq && install; }; then exit 0; fi
    printf 'set-up: apt-get could not install:%s; tests that need them are skipped\n' "$missing" >&2
else
    printf 'set-up: only root can install Debian packages: sudo apt-get install%s\n' "$missing" >&2
fi
exit 1
