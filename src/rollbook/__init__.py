"""rollbook: RL post-training for language models that keeps its books balanced."""

__version__ = "0.1.0"
