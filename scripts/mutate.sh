#!/usr/bin/env bash
# Put small mistakes (mutants) into the package, one at a time, and run the tests that should detect
# them. Prints one line per mutant that survives, and a score per folder.
#   scripts/mutate.sh [PATH...]                       all mutants; resumes where it was stopped
#   scripts/mutate.sh --since COMMIT --seconds 22     a sample, on lines changed since that commit
#   scripts/mutate.sh --draw 200 --seed 1 [PATH...]   a sample for a score
#   --jobs N: run N at a time; --without PATH: leave out these files or folders
# Exit status: 1 if a mutant survives that tests/mutants.toml does not call equivalent.
# tests/mutants.toml lists the files, the kinds of mutants, their tests, and equivalent mutants.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python "$MIXKV_ROOT/scripts/mutate.py" "$@"
