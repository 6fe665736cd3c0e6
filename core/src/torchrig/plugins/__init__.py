"""A name -> one plugin, imported, checked and able to run here; and one plugin manager for each prepare.

Which entry point a name means, and the typed error where it means none: :mod:`.selection`. From entry point to checked
plugin: :mod:`.loading`. What is no plugin of torchrig's dressed as one: :mod:`.foreign`. Mode and options against what
a backend takes: :mod:`.request`. One hook of one plugin, its answer checked: :mod:`.asking`. The lists that the command
line prints: :mod:`.inventory`.
"""

from .asking import ask
from .loading import Plugin
from .request import check_request
from .selection import load_backend, load_strategy, load_transform, make_manager

__all__ = ["Plugin", "ask", "check_request", "load_backend", "load_strategy", "load_transform", "make_manager"]
