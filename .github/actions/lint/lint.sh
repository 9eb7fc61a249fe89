#!/usr/bin/env bash
# Lints PATHS, one a line, and prints annotations. If SARIF is true, the findings are written to a file for the upload.
set -euo pipefail

tool=$RUNNER_TEMP/mil-ane-passes/bin/mil-ane-passes
arguments=()
while IFS= read -r path; do
    case $path in
        "") ;;
        -*) arguments+=("./$path") ;; # a path, and not an option
        *) arguments+=("$path") ;;
    esac
done <<< "$PATHS"
if [ "${#arguments[@]}" -eq 0 ]; then
    echo "::error title=mil-ane-passes lint::no paths given; expected one a line"
    exit 2
fi
[ -z "$TARGET" ] || arguments+=("--target=$TARGET")
[ -z "$BASELINE" ] || arguments+=("--baseline=$BASELINE")
[ -z "$FAIL_ON" ] || arguments+=("--fail-on=$FAIL_ON")
[ -z "$FAIL_UNDER" ] || arguments+=("--fail-under=$FAIL_UNDER")

if [ "$SARIF" = true ]; then
    file=$RUNNER_TEMP/mil-ane-passes.sarif
    rm -f "$file"
    "$tool" lint "${arguments[@]}" --format sarif -o "$file" > "$RUNNER_TEMP/mil-ane-passes.log" 2>&1 || true
    # What went wrong there goes wrong again below, where it is printed and ends the step.
    if [ -f "$file" ]; then
        echo "sarif=$file" >> "$GITHUB_OUTPUT"
    fi
fi
"$tool" lint "${arguments[@]}" --format github
