"""Reads that end in a client's GPU memory, verified and decrypted by the GPU.

Layer: a sibling of `store`, `crypto` and `origin`, used by `read`. CUDA lives in a spawned process
per GPU and never in the daemon, so that a fault of the device costs a worker and not the node.

    protocol    what daemon and worker say to each other; no CUDA
    link        one worker process and the socket to it; no CUDA
    supervisor  the life of a worker: started, watched, ended, started again; no CUDA
    device      one GPU as the daemon uses it: targets, slabs, reads; no CUDA
    reads, settings     what a read and a worker are made of, as values; no CUDA
    node        the GPUs of this node, found at start, looked up by UUID; no CUDA
    probe       asks a child process which GPUs there are; no CUDA
    identity    UUIDs as people write them
    worker/     the worker process: the only code that imports cuda.bindings (and `build`, NVRTC)
    keys        key schedules as the kernels want them; no CUDA
    layout      the structures of kernels/layout.h, byte for byte; no CUDA
    kernels/    CUDA C++: CRC-64, GHASH and AES-256-CTR of a batch of frames
    build       compiles the kernels and caches them; imports NVRTC only when it must compile
"""
