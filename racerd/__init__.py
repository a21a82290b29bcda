"""racerd: the node-local dataplane of a model-weight cache.

One daemon per node puts the bytes of model files straight into a client's memory. The folders
are the layers; imports go down only (`pyproject.toml` holds the contract that checks it):

    app      composition root
    serve    client socket, diagnostics HTTP
    read     plan, flight, pipeline: the ladder memory, disk, origin
    wire · store · crypto · origin      siblings that do not know each other
    ids · pages · units · errors · config · telemetry · runtime      values and doors
"""

__version__ = "0.1.0"
