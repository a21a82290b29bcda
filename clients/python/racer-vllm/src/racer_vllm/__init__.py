"""vLLM's weights through racerd: load format `racer`, and the commands that prepare a model.

    racer-vllm serve racer://models/bucket/llama
or, in two steps,
    racer-vllm-fetch racer://models/bucket/llama ./llama
    vllm serve ./llama --load-format racer

Layers, imports go down only: `plugin` and `cli` on top; `loader` and `serve`; `fetch`;
`vllm_api`, the one door to vLLM; `options`, `guard` and `record`, which are pure or read one file.
Only `loader` and `vllm_api` need vLLM, and nothing of this package is imported before it is used.
"""

__version__ = "0.1.0"
