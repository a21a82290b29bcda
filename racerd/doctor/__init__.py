"""`racerd doctor`: what this node has for racerd, what it lacks, and what to do about it.

Layer: beside the app; blocking, one thread. Each check has two halves in one module: `probe` looks
(it reads files and asks the kernel, and changes nothing but for probe files that it removes again),
`judge` makes findings of the facts and is pure. CUDA is never loaded into the process that calls:
`gpu_child` asks the driver, and what it did not come to say is a finding too.
"""
