#!/usr/bin/env bash
# Installs mil_ane_passes in an environment of its own: the version VERSION, or the source that the action comes with.
set -euo pipefail

what=$GITHUB_ACTION_PATH/../../..
if [ -n "$VERSION" ]; then
    what=mil_ane_passes==$VERSION
fi
python3 -m venv "$RUNNER_TEMP/mil-ane-passes"
"$RUNNER_TEMP/mil-ane-passes/bin/python" -m pip install --quiet "$what"
