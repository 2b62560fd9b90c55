"""The Hydra configs, and the one piece of arithmetic that they use."""

from omegaconf import OmegaConf


def divide(total: int, parts: int) -> int:
    """``${divide:16,${data.microbatches}}``: a whole number in equal parts.

    Raises:
        ValueError: it does not divide.
    """
    if parts < 1 or total % parts:
        raise ValueError(f"expected a divisor of {total}, got {parts}")
    return total // parts


OmegaConf.register_new_resolver("divide", divide, replace=True)
