#!/usr/bin/env bash
# Put small mistakes (mutants) into the package, one at a time, and run the tests that should notice
# them. Prints one line per mutant that survives, and a score per folder.
#   scripts/mutate.sh [PATH...]                       all mutants; resumes where it was stopped
#   scripts/mutate.sh --since COMMIT --seconds 22     a sample of those on lines changed since then
#   scripts/mutate.sh --draw 200 --seed 1 [PATH...]   a sample for a score
#   --jobs N: so many at a time; --without PATH: not these
# Exit status: 1 if any survives that tests/mutants.toml does not call equivalent.
# tests/mutants.toml says what is mutated, how, against which tests, and which mutants are equivalent.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python "$MIXKV_ROOT/scripts/mutate.py" "$@"
