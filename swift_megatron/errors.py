"""Input that cannot be run: one sentence for each fault, with the value, the rule and what to type instead.

`cli/errors.py` alone prints them and ends the process. Needs no torch.
"""
from typing import Sequence


class UserError(ValueError):
    """What a user can mend.

    Args:
        faults: A sentence for each fault, or the one there is.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__('; '.join(self.faults))


class ConfigError(UserError):
    """Arguments, files or folders that cannot be used."""


class PlanError(UserError):
    """An architecture or a configuration that cannot be cut over tensor-parallel ranks."""


class StageError(UserError):
    """An architecture that cannot be cut into pipeline stages."""


class MergeError(ConfigError):
    """An adapter that cannot be merged into its base."""
