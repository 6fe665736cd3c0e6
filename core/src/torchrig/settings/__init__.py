"""The settings of a prepare: one frozen model, every value with its origin.

Sources give layers of values with origins (:mod:`.sources`, :mod:`.environment`, :mod:`.yamlfile`), which are merged by
precedence (:mod:`.layers`), checked (:mod:`.values`, :mod:`.validation`) and held in one model (:mod:`.model`).
"""

from .model import OnProblem, Row, Settings

__all__ = ["OnProblem", "Row", "Settings"]
