"""Reads: plan the pages, join or lead a flight for each, walk the ladder, deliver.

Layer: read. The ladder is memory, disk, (peer,) origin. All of it runs on the loop thread; bytes
move on worker threads, between buffers that a lease, a share or a charge keeps.

reader         the facade of one cache; `services` is what all caches share
page_reader    one page of one read: acquire, deliver, start over elsewhere if the bytes were bad
stream         chunks in order, a little ahead of their consumer; `holds`, `window` help
flight         one acquisition of a page for all who wait for it
ladder · rungs       who may have a page, in order, and why he had not
memory         sealed pages in arena slots, by lease; S3-FIFO
sources · rooms · strays      what an acquisition yields, where its bytes lie, calls left behind
gpu_pages      the same for GPU memory; `gpu_disk` is its rung `cufile`: slab to GPU directly
delivery       sealed or plain bytes into the reader's memory, on the `open` threads
keeping · writeback   plaintext is sealed, kept in memory, sent to its disk
admission      byte budgets, shared fairly between connections
versions       which version is current, which are known
plan · partial · explain · settings    values and small decisions (no I/O)
"""
