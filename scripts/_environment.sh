# shellcheck shell=bash
# What quickstart.sh and test.sh share: the Python environment, the model and the data. Sourced, never run.
#
#   VENV    the environment to make and use                                     (default: .venv in the repository)
#   PYTHON  the Python, 3.11 or 3.12, that makes it                             (default: the first found)
#   WORK    where models, data, downloads and the outputs of runs go            (default: work in the repository)

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$(realpath -m -- "${VENV:-$ROOT/.venv}")"
WORK="$(realpath -m -- "${WORK:-$ROOT/work}")"
MODEL="$WORK/models/SmolLM2-135M-Instruct"
DATA="$WORK/data"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

# Two ranks share the cores of one machine: OpenMP threads that spin while they wait take them from each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
# Everything is local: no hub is asked, and what the libraries cache stays out of the home folder.
export USE_HF=1 HF_HUB_OFFLINE=1
export HF_HOME="${HF_HOME:-$WORK/cache/huggingface}" MODELSCOPE_CACHE="${MODELSCOPE_CACHE:-$WORK/cache/modelscope}"
export TOKENIZERS_PARALLELISM=false
# Ranks of one machine meet on its loopback, whatever its host name resolves to.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

say() {
    printf '\n==> %s\n' "$*"
}

# Prints the first Python on this machine that the package supports.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        if [[ "$candidate" == "${PYTHON:-}" ]]; then
            break
        fi
    done
    printf 'No Python 3.11 or 3.12 found (PYTHON=%s)\n' "${PYTHON:-}" >&2
    return 1
}

# make_environment REQUIREMENT...: makes VENV and installs the package, with what else is required, in it. Does nothing
# when the same was installed from the same files before, so that a second run needs no network.
make_environment() {
    local files stamp="$VENV/.swift-megatron" torch python
    files="$(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum | cut -d ' ' -f 1) $ROOT"
    if [[ -f "$stamp" ]] && grep -Fqx -- "$files $*" "$stamp"; then
        say "Environment $VENV is complete"
        return
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        say "Making the environment $VENV with $("$python" --version)"
        "$python" -m venv "$VENV"
    fi
    # Other packages would take the newest torch, and deepspeed looks for one while it is built.
    torch="$(grep '^torch==' "$ROOT/constraints.txt")"
    say "Installing $torch, the package and what it needs (some minutes, quietly)"
    "$VENV/bin/python" -m pip install -qq "$torch"
    (cd -- "$ROOT" && "$VENV/bin/python" -m pip install -qq -c constraints.txt "$@")
    # Lines of other files are out of date, lines of the same files are what else is installed.
    if [[ -f "$stamp" ]] && ! grep -Fq -- "$files " "$stamp"; then
        rm -- "$stamp"
    fi
    printf '%s\n' "$files $*" >>"$stamp"
}

make_model_and_data() {
    say "Making the model $MODEL"
    "$VENV/bin/python" "$ROOT/scripts/make_model.py" --out "$MODEL" --cache "$WORK/cache"
    say "Making the data $DATA"
    "$VENV/bin/python" "$ROOT/scripts/make_data.py" --out "$DATA" --cache "$WORK/cache"
}
