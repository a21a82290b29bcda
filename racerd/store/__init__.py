"""The slab store: sealed pages on disk. Synchronous; knows no event loop and no wall clock."""
