#!/usr/bin/env bash
# Runs the tests, from nothing.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/test.sh [PYTEST ARGUMENT]...

Makes a Python environment with what the tests need, the model and the data, and runs the tests: all of them, or what
the arguments select, for instance: scripts/test.sh -m 'not slow'

Environment:
  VENV    the environment to make and use (default: .venv in the repository)
  PYTHON  the Python that makes it (default: the first of 3.11, 3.12 found)
  WORK    where the model and the data go (default: work in the repository)
EOF
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    usage
    exit 0
fi

# shellcheck source=scripts/_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"
cd -- "$ROOT"

make_environment -e '.[test,qlora]'
make_model_and_data
# The tests find the model and the data by these.
export SWIFT_MEGATRON_TEST_MODEL="$MODEL" SWIFT_MEGATRON_TEST_DATA="$DATA"

say 'Running the tests'
PATH="$VENV/bin:$PATH" exec "$VENV/bin/python" -m pytest "$@"
