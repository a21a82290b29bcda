"""The one door to vLLM: what this package uses of it, with types.

Layer: bottom, and the only module that imports vLLM or torch. Private parts of vLLM are touched
here and nowhere else, so that a new release is checked by reading one file against it. What vLLM's
own loader decides (which experts a rank needs, which parameters must have been loaded) is asked of
vLLM's own loader, not written anew.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import vllm
from vllm.model_executor.model_loader import (
    _LOAD_FORMAT_TO_MODEL_LOADER,
    DefaultModelLoader,
    register_model_loader,
)
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import enable_tqdm, get_quant_config

__all__ = ["BaseModelLoader", "LoadConfig", "Model", "ModelConfig", "Source", "VllmRules"]

logger = logging.getLogger("vllm.racer")


class LoadConfig(Protocol):
    """What is used of vLLM's LoadConfig."""

    model_loader_extra_config: object
    safetensors_load_strategy: str | None
    use_tqdm_on_load: bool


class ModelConfig(Protocol):
    """What is used of vLLM's ModelConfig: of the target's, a draft's, or any other model's."""

    model: str
    model_weights: str
    quantization: str | None


class Model(Protocol):
    """What is used of a vLLM model."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str] | None:
        """Takes all weights; returns the names of the parameters that it loaded, if it tells."""


class Source(Protocol):
    """vLLM's DefaultModelLoader.Source: where some of a model's weights are."""

    model_or_path: str
    subfolder: str | None
    prefix: str
    allow_patterns_overrides: list[str] | None


if TYPE_CHECKING:

    class BaseModelLoader:
        """vLLM's; `load_model` is inherited."""

        load_config: LoadConfig

        def __init__(self, load_config: LoadConfig) -> None: ...

else:
    from vllm.model_executor.model_loader import BaseModelLoader


def vllm_version() -> str:
    return str(vllm.__version__)


def register_loader(load_format: str, loader: type[BaseModelLoader]) -> None:
    """Registers `loader`, unless it already is."""
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(load_format) is not loader:
        register_model_loader(load_format)(loader)


def shows_progress(load_config: LoadConfig) -> bool:
    """Whether this process is the one that shows a bar."""
    return bool(enable_tqdm(load_config.use_tqdm_on_load))


def rank_text() -> str:
    """Which rank this process is: empty where there is only one."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return ""
    names = (("DP", "get_dp_group"), ("PP", "get_pp_group"), ("TP", "get_tp_group"))
    groups = [(name, getattr(parallel_state, get)()) for name, get in names]
    return ", ".join(
        f"{name} rank {group.rank_in_group} of {group.world_size}"
        for name, group in groups
        if group.world_size > 1
    )


class VllmRules:
    """What vLLM's own loader would decide for the same model."""

    def __init__(self, load_config: LoadConfig) -> None:
        config: Any = load_config
        self._own: Any = DefaultModelLoader(
            dataclasses.replace(config, load_format="auto", model_loader_extra_config={})
        )

    def prepare(self, model: Model, model_config: ModelConfig) -> None:
        """Finds out which weights this rank has no use for. Raises ValueError for a checkpoint of
        torchao's own kind, in which tensors lie in parts."""
        if model_config.quantization == "torchao":
            quantisation = get_quant_config(model_config, self._own.load_config)
            if getattr(quantisation, "is_checkpoint_torchao_serialized", False):
                raise ValueError(
                    "load format racer does not read torchao checkpoints, whose tensors vLLM puts"
                    " together from parts: use --load-format safetensors for this model"
                )
        self._own._init_ep_weight_filter(model_config)
        self._own._init_mm_encoder_only_weight_filter(model, model_config)

    def wants(self, model: Model | None) -> Callable[[str], bool]:
        """A function of a weight's name in its file: whether this rank has a use for it.

        Experts of other ranks (`--enable-ep-weight-filter`), what `model` says it does not use of
        its own files, and with `--mm-encoder-only` the language model are not read.
        """
        local_experts = self._own.local_expert_ids
        unused = getattr(model, "is_unused_checkpoint_weight", None)
        prefixes = self._own._encoder_only_lm_prefixes
        mapper = self._own._encoder_only_weights_mapper

        def wanted(name: str) -> bool:
            if should_skip_weight(name, local_experts):
                return False
            if unused is not None and unused(name):
                return False
            if prefixes is not None:
                mapped = name if mapper is None else mapper.map_name(name)
                return mapped is None or not mapped.startswith(prefixes)
            return True

        return wanted

    def check_loaded(
        self, model: Model, model_config: ModelConfig, loaded: set[str] | None, verify: bool | None
    ) -> None:
        """Looks for parameters that no weight initialised.

        vLLM's own rule checks models that are not quantised, and of these not the linear layers
        and embeddings; drafts rely on that, which get theirs from the target later. So, without
        `verify`, what its rule finds is a ValueError, and what it leaves out is a warning; with
        True everything is a ValueError, with False nothing is looked for.
        """
        if verify is False:
            return
        if loaded is None:
            if verify:
                raise ValueError(
                    f"verify is true, but {type(model).__name__} does not tell what it loaded"
                )
            return
        if verify is None and model_config.quantization is None:
            self._own.track_weights_loading(model, set(loaded), quantized=False)
        try:
            self._own.track_weights_loading(model, set(loaded), quantized=True)
        except ValueError as error:
            if verify:
                raise
            logger.warning("racer: %s; with option verify that is an error", error)

    def weights_from_elsewhere(self, source: Source) -> Iterator[tuple[str, Any]]:
        """Weights of another model as vLLM's own loader gets them, under their names there."""
        unnamed: Any = source
        yield from self._own._get_weights_iterator(dataclasses.replace(unnamed, prefix=""))


def secondary_sources(model: Model) -> Sequence[Source]:
    """Where a model made of several has the rest of its weights."""
    return tuple(getattr(model, "secondary_weights", ()))


def primary_patterns(model: Model) -> list[str] | None:
    """The files that a model takes its weights from, where these are not the usual ones."""
    patterns: list[str] | None = getattr(model, "allow_patterns_overrides", None)
    return patterns
