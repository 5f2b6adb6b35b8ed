#!/usr/bin/env bash
# No test's name begins with a dash: Catch2 would take it for an option when CTest asks for that test alone.
#   test_names.sh ROOT
set -euo pipefail
cd "${1:?usage: test_names.sh ROOT}"

found=$(grep -rnE --include='*.cpp' -A1 '^(TEST_CASE|TEMPLATE_TEST_CASE)\($|^(TEST_CASE|TEMPLATE_TEST_CASE)\("-' tests $(ls -d lab 2>/dev/null) | grep -E '\("-|^[^ ]*- +"-' || true)
[ -z "$found" ] || { echo "a test's name begins with a dash:"; echo "$found"; exit 1; }
grep -rq --include='*.cpp' '^TEST_CASE(' tests || { echo "no tests found: is '$1' the root of the repository?"; exit 1; }
