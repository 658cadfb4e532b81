#!/usr/bin/env bash
# Runs the tests, from nothing.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/test.sh [PYTEST ARGUMENT]...

Makes a Python environment with what the tests need, the model and the data, and runs the tests: all of them, or what
the arguments select. Tells the 15 slowest parts and the time of all. Once the environment is there, a part takes less
than a minute:

  scripts/test.sh tests/unit/test_plan.py                  a file or a folder
  scripts/test.sh tests/e2e/test_variants.py -k 'dft'      tests of it whose name has a word
  scripts/test.sh -m 'not slow' -x                         without the commands; stop at the first failure
  scripts/test.sh --durations=0 tests/distributed          with the time of every test

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
# Arguments that come later win: these are only what is told when nothing else is asked for.
status=0
PATH="$VENV/bin:$PATH" "$VENV/bin/python" -m pytest --durations=15 --durations-min=0.1 "$@" || status=$?
say "All in all: $((SECONDS / 60)) min $((SECONDS % 60)) s, with the environment, the model and the data"
exit "$status"
