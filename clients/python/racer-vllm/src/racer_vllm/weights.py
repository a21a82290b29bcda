"""What every engine's way of loading has in common.

Layer: on `racer.load` and `record`.
"""

from __future__ import annotations

import racer
from racer_vllm.record import ModelPlace


def check_versions(stream: racer.TensorStream, place: ModelPlace) -> None:
    """Raises VersionChanged where the weights are not those that the directory was made for."""
    assert stream.model is not None, "an open stream knows its model"
    if not place.versions:
        return
    for shard in stream.model.shards:
        expected = place.versions.get(shard.file.name)
        if expected != shard.file.version:
            made_for = f"version {expected}" if expected else "other files"
            raise racer.VersionChanged(
                f"{shard.file.url} is version {shard.file.version}, and the model directory was"
                f" prepared for {made_for}",
                hint="run racer-vllm-fetch again, so that configuration and weights go together",
            )
