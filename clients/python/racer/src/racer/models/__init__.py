"""Model directories: where their files lie, and which tensor comes from which of them.

`source` is the protocol by which bytes are read, `local` and `prefix` (behind racerd) speak it;
`names` decides by names alone which files count; `directory` puts their headers to it and gives a
`ModelDirectory`: checked, before any payload byte.
"""

from racer.models.directory import ModelDirectory, Shard
from racer.models.opening import open_source
from racer.models.source import Source, SourceFile, SourceLanding

__all__ = ["ModelDirectory", "Shard", "Source", "SourceFile", "SourceLanding", "open_source"]
