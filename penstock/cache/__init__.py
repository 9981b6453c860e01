"""Who owns which page and which slot, and which prefixes can be reused. Integers only: never a tensor."""

from penstock.cache.manager import Cache
from penstock.cache.sessions import SessionLimits

__all__ = ["Cache", "SessionLimits"]
