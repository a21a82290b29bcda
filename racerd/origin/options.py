"""What an operator may say about an origin. The declarations live in `racerd.config`.

Layer: origin, pure values.
"""

from racerd.config.origin_options import OriginOptions, Secret

__all__ = ["OriginOptions", "Secret"]
