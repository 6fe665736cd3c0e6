"""A module tree -> its regions: the modules that are worth one compiled graph for each kind. Pure.

The tree with each module's structure: :mod:`.structure`. What repeats in it: :mod:`.repeats`. What of it is chosen,
grouped into kinds and explained: :mod:`.choice`.
"""

from .choice import find_blocks, find_regions
from .structure import resolve

__all__ = ["find_blocks", "find_regions", "resolve"]
