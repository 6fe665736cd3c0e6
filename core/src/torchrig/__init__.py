"""torchrig."""
