"""The loader of load format `racer`.

Layer: on `racer.load`, `record` and the door to vLLM. vLLM makes one in each worker process, for
each model: `load_model` is vLLM's own, so that quantised models, tied embeddings and the steps
after loading are exactly as with its own loader, and here is only where the weights come from.

Tensors are given in host memory, as vLLM's own loader gives them, and each parameter takes its
rank's part onto its own device: no other device is ever touched. Reads in the background end, and
their memory is given back, before `load_weights` returns or raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import racer
from racer_vllm import __version__
from racer_vllm.guard import check_version
from racer_vllm.options import parse_options
from racer_vllm.places import matching_places
from racer_vllm.record import ModelPlace, is_known_place, place_of
from racer_vllm.vllm_api import (
    BaseModelLoader,
    LoadConfig,
    Model,
    ModelConfig,
    Source,
    VllmRules,
    logger,
    primary_patterns,
    rank_text,
    secondary_sources,
    shows_progress,
    vllm_version,
)
from racer_vllm.weights import check_versions

Weights = Generator[tuple[str, Any], None, None]
Wanted = Callable[[str], bool]


class RacerModelLoader(BaseModelLoader):
    """Loads the weights of a model that `racer-vllm-fetch` prepared, or of a `racer://` URL."""

    def __init__(self, load_config: LoadConfig) -> None:
        warning = check_version(vllm_version())
        self._options = parse_options(load_config.model_loader_extra_config)
        super().__init__(load_config)
        if warning is not None:
            logger.warning("%s", warning)
        self._rules = VllmRules(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Checks that the weights are there, whole and of the right version; reads no payload."""
        place = _primary_place(model_config)
        with _told(place), self._stream(place, lambda name: True) as stream:
            check_versions(stream, place)

    def load_weights(self, model: Model, model_config: ModelConfig) -> None:
        """Loads all weights into `model`, also into one that has some."""
        self._rules.prepare(model, model_config)
        with closing(self.get_all_weights(model_config, model)) as weights:
            loaded = model.load_weights(weights)
        self._rules.check_loaded(model, model_config, loaded, self._options.verify)

    def get_all_weights(self, model_config: ModelConfig, model: Model) -> Weights:
        """Yields name and tensor of the model's weights, and of what else it is made of.

        vLLM reloads models in place through this, without `load_weights`.
        """
        reports: list[racer.LoadReport] = []
        try:
            place = _primary_place(model_config)
            yield from self._read(place, primary_patterns(model), self._rules.wants(model), reports)
            for source in secondary_sources(model):
                with closing(self._read_secondary(source, reports)) as weights:
                    # `map` keeps no tensor: what the model drops must go at once.
                    yield from map(_renamer(source.prefix), weights)
        finally:
            _log_summary(reports)

    def _read_secondary(self, source: Source, reports: list[racer.LoadReport]) -> Weights:
        patterns = source.allow_patterns_overrides
        others = [name for name in patterns or () if not name.endswith(".safetensors")]
        if others or not is_known_place(source.model_or_path):
            # A model of another repository, or a file of another format beside the configuration.
            logger.info("racer: %s comes through vLLM's own loader", source.model_or_path)
            yield from self._rules.weights_from_elsewhere(source)
            return
        place = place_of(source.model_or_path)
        if source.subfolder is not None:
            place = place.below(source.subfolder)
        yield from self._read(place, patterns, self._rules.wants(None), reports)

    def _read(
        self,
        place: ModelPlace,
        patterns: list[str] | None,
        wanted: Wanted,
        reports: list[racer.LoadReport],
    ) -> Weights:
        places = [place]
        if patterns is not None:
            places = matching_places(place, patterns, socket=self._options.socket)
        for part in places:
            with _told(part), self._stream(part, wanted) as stream:
                reports.append(stream.report)
                check_versions(stream, part)
                yield from stream

    def _stream(self, place: ModelPlace, wanted: Wanted) -> racer.TensorStream:
        return racer.load(
            place.location,
            staging_bytes=self._options.staging_bytes,
            in_flight=self._options.in_flight,
            filter=wanted,
            progress=shows_progress(self.load_config),
            # As vLLM does: the index decides, and what it does not name is left out (and logged).
            extra_shards="ignore",
            names=place.names,
            share=self._options.share,
            socket=self._options.socket,
        )


def _primary_place(model_config: ModelConfig) -> ModelPlace:
    return place_of(model_config.model_weights or model_config.model)


def _renamer(prefix: str) -> Callable[[tuple[str, Any]], tuple[str, Any]]:
    return lambda weight: (prefix + weight[0], weight[1])


@contextmanager
def _told(place: ModelPlace) -> Iterator[None]:
    """Adds to an error who met it: of several ranks on several nodes, logs show only one."""
    try:
        yield
    except Exception as error:
        rank = rank_text()
        error.add_note(
            f"while {place.location} was loaded on {os.uname().nodename}{rank and ', ' + rank}"
        )
        raise


def _log_summary(reports: list[racer.LoadReport]) -> None:
    """One line for all that a load read, also where it did not come to its end."""
    if not reports:
        return
    rank = rank_text()
    logger.info(
        "racer: %s, racer-vllm %s, vLLM %s%s",
        "; and ".join(map(str, reports)),
        __version__,
        vllm_version(),
        rank and f"; {rank}",
    )
