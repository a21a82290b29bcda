#!/usr/bin/env bash
# Installs the servers that tests start and that are not Python packages: nginx, curl, Azurite.
# Idempotent. Needs root for apt-get; Azurite goes to ${RACER_TEST_CACHE:-~/.cache/racer-tests}.
set -euo pipefail
cache=${RACER_TEST_CACHE:-$HOME/.cache/racer-tests}

if ! { command -v nginx && command -v curl; } >/dev/null 2>&1; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light curl
fi

if [ ! -x "$cache/azurite/node_modules/.bin/azurite-blob" ]; then
  mkdir -p "$cache/azurite"
  cd "$cache/azurite"
  [ -f package.json ] || npm init -y >/dev/null
  npm install --silent --no-audit --no-fund azurite@3.35.0
fi
