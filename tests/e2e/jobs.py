"""What the end-to-end tests run in their processes."""
from typing import Any


def train(program: str, command: str, argv: list[str]) -> dict[str, Any]:
    """One training by plain ms-swift or by this package; ms-swift's result."""
    if program == 'plain':
        from swift.pipelines import pretrain_main, sft_main
        return {'sft': sft_main, 'pt': pretrain_main}[command](argv)
    from swift_megatron.pipelines.sft import pt_main, sft_main
    return {'sft': sft_main, 'pt': pt_main}[command](argv)
