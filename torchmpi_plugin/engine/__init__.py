"""The Python face of the C engine: pending operations, who waits for them, and the Work that a user holds."""

from .engine import set_chunk_limit

__all__ = ["set_chunk_limit"]
