"""vLLM in one process, driven line by line: runs in the environment that install_vllm.sh made.

    python engine.py REQUESTS ANSWERS      (two inherited descriptors)

Each request is a line of JSON, `{"action": …, …}`, and has one line as its answer: what the action
returns, or `{"error": kind, "text": message with notes}`. vLLM takes half a minute to start and a
few seconds for each further model, so that all tests share one such process. It imports nothing of
the tests: their packages are not in this environment.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

PROMPT = [5, 17, 42, 7]
TOKENS = 12

# Small, and without what only costs time here: compiling, and a cache for many requests.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}


class Lines(logging.Filter):
    """Keeps what is logged until it is asked for, and filters nothing.

    A filter, since vLLM takes other people's handlers away whenever it configures logging.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Engine:
    """At most one model at a time."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.lines = Lines()

    def start(self) -> dict[str, object]:
        import vllm
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        registered = loaders.get("racer")
        logging.getLogger("vllm.racer").addFilter(self.lines)
        return {"version": vllm.__version__, "loader": getattr(registered, "__name__", "none")}

    def register_again(self) -> dict[str, object]:
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders

        from racer_vllm.plugin import register

        warnings = Lines()
        logging.getLogger("vllm.model_executor.model_loader").addFilter(warnings)
        before = dict(loaders)
        register()
        logging.getLogger("vllm.model_executor.model_loader").removeFilter(warnings)
        return {"same": loaders == before, "log": warnings.take()}

    def open(self, model: str, **settings: Any) -> dict[str, object]:
        from vllm import LLM

        self.close()
        self.lines.take()
        self.llm = LLM(model, **{**SETTINGS, **settings})
        return {"log": self.lines.take()}

    def generate(self) -> dict[str, object]:
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )
        [answer] = self.llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
        return {"token_ids": list(answer.outputs[0].token_ids)}

    def run(self, model: str, **settings: Any) -> dict[str, object]:
        """open, generate and close."""
        opened = self.open(model, **settings)
        try:
            return {**opened, **self.generate(), **self.facts()}
        finally:
            self.close()

    def reload(self, **arguments: Any) -> dict[str, object]:
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc("reload_weights", kwargs=arguments)
        return {"log": self.lines.take()}

    def facts(self) -> dict[str, object]:
        def of_model(model: Any) -> dict[str, object]:
            head = getattr(model, "lm_head", None)
            embedding = getattr(model.model, "embed_tokens", None)
            quantised = {type(m.quant_method).__name__ for m in model.modules()
                         if hasattr(m, "quant_method")}  # fmt: skip
            return {
                "tied": head is not None and head.weight is embedding.weight,
                "quant_methods": sorted(quantised),
            }

        return dict(self.llm.apply_model(of_model)[0])

    def load_only(
        self,
        model: str,
        secondary: list[dict[str, Any]] = [],  # noqa: B006 - it is not changed
        experts: list[int] | None = None,
        stop_after: int | None = None,
        extra: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """The loader on a model that only takes note of its weights, and raises after some."""
        from types import SimpleNamespace

        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

        taken: dict[str, str] = {}

        sources = [DefaultModelLoader.Source(**source) for source in secondary]

        class Model(SimpleNamespace):
            def load_weights(self, weights: Any) -> None:
                for name, tensor in weights:
                    taken[name] = f"{tensor.dtype} {tensor.device}"
                    if stop_after is not None and len(taken) == stop_after:
                        raise RuntimeError("the model has had enough")

        config = LoadConfig(load_format="racer", model_loader_extra_config=extra or {})
        loader: Any = get_model_loader(config)
        loader._rules._own.local_expert_ids = None if experts is None else set(experts)
        described = SimpleNamespace(
            model=model, model_weights="", revision=None, quantization=None, is_moe=False,
            multimodal_config=None,
        )  # fmt: skip
        self.lines.take()
        # vLLM has a device and a type as defaults where it makes models.
        with set_current_vllm_config(VllmConfig()), torch.device("meta"):
            loader.load_weights(Model(secondary_weights=sources), described)
        return {"taken": taken, "log": self.lines.take()}

    def left(self) -> dict[str, object]:
        """Threads, sockets and shared memory of the client that are still there."""
        import threading

        gc.collect()
        held = [thread.name for thread in threading.enumerate() if thread.name.startswith("racer")]
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue  # The descriptor of this very listing.
            held += [target] if "memfd:racer" in target else []
        return {"left": held}

    def close(self) -> dict[str, object]:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        cleanup_dist_env_and_memory()
        return self.left()


def told(error: BaseException) -> dict[str, str]:
    """The error with its notes, and those of what caused it."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts += [f"{type(cause).__name__}: {cause}", *getattr(cause, "__notes__", [])]
        cause = cause.__cause__ or cause.__context__
    return {"error": type(error).__name__, "text": "\n".join(texts)}


def main() -> None:
    requests, answers = (int(text) for text in sys.argv[1:])
    engine = Engine()
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as output:
        for line in lines:
            arguments = json.loads(line)
            action: Callable[..., object] = getattr(engine, arguments.pop("action"))
            try:
                answer = action(**arguments)
            except Exception as error:
                logging.getLogger("vllm").exception("the request failed: %s", line.strip())
                answer = told(error)
            print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main()
