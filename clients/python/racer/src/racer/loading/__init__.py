"""Tensors of a model directory, streamed: `load`.

`plan` (pure) cuts the wanted bytes into chunks, `pipeline` reads them ahead of the consumer,
`frameworks` makes the tensors, `stream` is the iterator with its lifetime.
"""

from racer.loading.report import LoadReport
from racer.loading.stream import TensorStream, load

__all__ = ["LoadReport", "TensorStream", "load"]
