"""trimtab keeps an RL post-training run in trim."""

__version__ = "0.1.0"
