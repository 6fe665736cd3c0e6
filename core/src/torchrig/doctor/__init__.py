"""Everything a bug report needs, and what would stop a compile on this machine; fit to be pasted in public."""

from __future__ import annotations

from .examination import Examination, examine

__all__ = ["Examination", "examine"]
