"""Which sequence owns which page and slot, and which prefixes can be reused. Integers only, no
tensors.
"""

from penstock.cache.manager import Cache
from penstock.cache.sessions import SessionLimits

__all__ = ["Cache", "SessionLimits"]
