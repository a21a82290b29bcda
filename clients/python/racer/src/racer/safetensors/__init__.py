"""The safetensors format, read without trust and without torch.

`parse_file` and `parse_header` return a `Header`: the tensors in the order of their bytes, each
with its absolute range, and the metadata. Whatever is wrong is a `SafetensorsError`.
"""

from racer.safetensors.errors import SafetensorsError
from racer.safetensors.files import parse_file
from racer.safetensors.header import (
    HEADER_BYTES_MAX,
    Header,
    TensorInfo,
    header_stop_untrusted,
    parse_header,
)

__all__ = [
    "HEADER_BYTES_MAX",
    "Header",
    "SafetensorsError",
    "TensorInfo",
    "header_stop_untrusted",
    "parse_file",
    "parse_header",
]
