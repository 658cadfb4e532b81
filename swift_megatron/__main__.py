"""`python -m swift_megatron sft ...`, for torchrun and machines without the console script."""
from .cli.main import main

if __name__ == '__main__':
    main()
