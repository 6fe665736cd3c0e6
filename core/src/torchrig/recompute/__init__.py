"""Activation checkpointing: what a block computes on the way to its output is computed again in the backward, not kept.

Which blocks, and in which order with the compiler: :mod:`.choice`. The layer on a block's ``forward``: :mod:`.layer`.
The operators whose results are kept all the same: :mod:`.operators`. What a second computation must find and leave as
the first one did: :mod:`.buffers`. ``docs/decisions/008-activation-checkpointing.md`` has the measurements.
"""

from .choice import around, blocks, notes, refuse
from .layer import Checkpointer
from .operators import asked as saved

__all__ = ["Checkpointer", "around", "blocks", "notes", "refuse", "saved"]
