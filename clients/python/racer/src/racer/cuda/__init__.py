"""The door to the NVIDIA driver: memory that can be exported, copies, and others' CUDA arrays.

Layer: bottom. libcuda is loaded by ctypes when the first CUDA memory is asked for, never by an
import; nothing here needs torch, cupy, numba or a CUDA package. `driver` calls the library,
`device` finds a GPU, `memory` makes exportable memory, `dlpack` and `arrays` hand memory out and
take it in. Only the GPU that is asked for is touched.
"""
