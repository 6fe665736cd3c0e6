"""Mixed precision around a plain loop.

Autocast in the model's forward: :mod:`.autocast`. Loss scaling on the edges of the autograd graph: :mod:`.scaling`.
Steps skipped when a gradient overflowed: :mod:`.overflow`.
"""

from .autocast import apply, scaling_of

__all__ = ["apply", "scaling_of"]
