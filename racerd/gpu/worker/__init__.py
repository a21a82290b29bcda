"""The worker process of one GPU: the only code that imports cuda.bindings at run time.

Started with `python -m racerd.gpu.worker`, never by fork. It owns the context of one GPU, found by
UUID, and everything in it; it dies when the daemon's socket closes or the device is lost.

    driver    the one door to cuda.bindings.driver: errors, and which of them are the end
    memory    device, pinned and imported memory, each a context manager
    kernels   the module, and launching a batch
    batch     the job block of a batch: keys, AADs and frame jobs as the kernels read them
    opener    the pipeline: copy, verify, decrypt, report; two threads
    lane      what a batch needs on its way: stream, event, buffers
    verdicts  what a page is answered: by the kernels' words, or by an error
    cufile    cuFile providers; cufile_errors has their codes, readers the threads that read
    session   messages in, answers out
"""
