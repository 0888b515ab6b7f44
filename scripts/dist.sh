#!/usr/bin/env bash
# Build a release in dist/: the source distribution, and the wheel built from it. Install each into
# an empty environment, and check its version and commands. It uses the package index, but needs
# neither SGLang nor scripts/env.sh.
# Usage: scripts/dist.sh [REF]; if REF is refs/tags/v*, the tag must match the version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ref="${1:-}"
version="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)"
case "$ref" in
    refs/tags/v*)
        if [ "$ref" != "refs/tags/v$version" ]; then
            echo "error: the tag is ${ref#refs/tags/}, the version in pyproject.toml $version" >&2
            exit 1
        fi
        if grep -rn 'github.com/OWNER/' pyproject.toml README.md docs examples >&2; then
            echo "error: replace the placeholder OWNER before you publish" >&2
            exit 1
        fi
        ;;
esac

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
rm -rf dist
python3 -m venv "$work/tools"
"$work/tools/bin/pip" install -q build twine
"$work/tools/bin/python" -m build --outdir dist . >/dev/null
"$work/tools/bin/twine" check --strict dist/*
for file in dist/*; do
    echo "installing ${file##*/}"
    python3 -m venv --clear "$work/clean"
    "$work/clean/bin/pip" install -q "$file"
    installed="$("$work/clean/bin/python" -P -c 'import sglang_mixkv; print(sglang_mixkv.__version__)')"
    if [ "$installed" != "$version" ]; then
        echo "error: ${file##*/} installs version $installed" >&2
        exit 1
    fi
    for command in plan accept; do
        "$work/clean/bin/python" -P -m sglang_mixkv "$command" --help >/dev/null
    done
done
