"""`load`: the tensors of a model, one after the other, while the next ones are being read.

Layer: loading, on `models`, `plan` and `pipeline`. One consumer, any thread. Nothing is opened
before the first tensor is asked for (or `open` is called), and everything is closed when the last
one was given, when `close` is called, when a `with` block ends, when an exception passes through,
or when the stream is dropped; in this order: background reads, landings, connections.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from racer.errors import Closed
from racer.loading.frameworks import FrameworkName, check_all
from racer.loading.installed import open_installed
from racer.loading.pipeline import Pipeline
from racer.loading.plan import CHUNK_BYTES_MIN, LoadPlan, chunk_grid, plan_load
from racer.loading.progress import Progress, ProgressCallback, open_progress
from racer.loading.report import LoadReport
from racer.loading.sharing import ShareMode, Sharing
from racer.models.directory import ModelDirectory
from racer.models.names import ExtraShards
from racer.models.opening import Location, open_source
from racer.models.source import Source

STAGING_BYTES: Final = 256 << 20
IN_FLIGHT: Final = 4
IN_FLIGHT_MAX: Final = 64

_log = logging.getLogger("racer.load")


def load(
    url: Location,
    *,
    device: object = "cpu",
    framework: FrameworkName = "pt",
    staging_bytes: int = STAGING_BYTES,
    in_flight: int = IN_FLIGHT,
    filter: Callable[[str], bool] | None = None,
    progress: bool | ProgressCallback | None = None,
    extra_shards: ExtraShards = "refuse",
    names: Sequence[str] | None = None,
    share: ShareMode = "auto",
    socket: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> TensorStream:
    """Yields `(name, tensor)` for each tensor of the model at `url`.

        for name, tensor in racer.load("racer://models/bucket/llama"):
            parameters[name].copy_(tensor)

    `url` is a `racer://` prefix, a local directory, or one `.safetensors` file of either. Tensors
    come in natural order of the files and in the order of their bytes, the same each time; each has
    memory of its own and may be kept. `filter(name)` chooses; what nobody wants is not read.

    `staging_bytes` bounds the memory beyond the tensors that the consumer holds: half of it is
    landings, half tensors that are ready early. `in_flight` chunks are read at a time. `progress`
    is True for a bar, or a function of (done bytes, all bytes). `extra_shards="ignore"` leaves out
    weight files that the index does not name, instead of refusing the model. `names` are those of
    the directory's files, for a caller who knows them: a URL is not listed then, which is the one
    step that asks the origin each time. `share="auto"` maps
    memory that all readers of this model on the node share, where the daemon has it: large tensors
    are then views of it, copied page by page where they are written to, and what they keep from
    being freed is the daemon's. `share="off"` reads into memory of our own. `socket` is the
    daemon's, where it is not the default; `timeout` is how long, in seconds, a read may go without
    getting further (see `Client`).

    Raises ValueError here for arguments that cannot be, ModuleNotFoundError where the framework is
    not installed; at the first tensor SafetensorsError for
    files that are not what they should be (nothing was read of their payload then), RacerError for
    what the daemon says, OSError for what the disk says.
    """
    for name, value in (("staging_bytes", staging_bytes), ("in_flight", in_flight)):
        if type(value) is not int:
            raise ValueError(f"{name} is {value!r}: a whole number")
    if filter is not None and not callable(filter):
        raise ValueError(f"filter is {filter!r}: a function of a tensor's name")
    if staging_bytes < 2 * CHUNK_BYTES_MIN * in_flight:
        raise ValueError(
            f"staging_bytes is {staging_bytes:,}: {in_flight} in flight need at least"
            f" {2 * CHUNK_BYTES_MIN * in_flight:,}"
        )
    if not 1 <= in_flight <= IN_FLIGHT_MAX:
        raise ValueError(f"in_flight is {in_flight}: 1 to {IN_FLIGHT_MAX}")
    if share not in ("auto", "off"):
        raise ValueError(f"share is {share!r}: 'auto' or 'off'")
    if extra_shards not in ("refuse", "ignore"):
        raise ValueError(f"extra_shards is {extra_shards!r}: 'refuse' or 'ignore'")
    # A GPU may be filled without any host memory; where not, pieces are asked for one by one.
    at_once = share == "auto" and str(device) == "cpu"
    source, only = open_source(url, names=names, socket=socket, timeout=timeout, share=at_once)
    return TensorStream(
        source,
        only=only,
        device=device,
        framework=framework,
        chunk_bytes=staging_bytes // (2 * in_flight),
        in_flight=in_flight,
        filter=filter,
        progress=progress,
        extra_shards=extra_shards,
        share=share,
    )


class TensorStream:
    """The iterator that `load` returns; also a context manager. Owns `source`.

    `report` tells how far it is, and what it did in the end. After `open`, `model` and `plan` tell
    what will be loaded.
    """

    def __init__(
        self,
        source: Source,
        *,
        only: str | None = None,
        device: object = "cpu",
        framework: str = "pt",
        chunk_bytes: int = STAGING_BYTES // (2 * IN_FLIGHT),
        in_flight: int = IN_FLIGHT,
        filter: Callable[[str], bool] | None = None,
        progress: bool | ProgressCallback | None = None,
        extra_shards: ExtraShards = "refuse",
        share: ShareMode = "auto",
    ) -> None:
        self._framework = open_installed(framework, device)
        self._source = source
        self._only = only
        self._chunk_bytes = chunk_bytes
        self._in_flight = in_flight
        self._filter = filter
        self._progress = open_progress(progress, f"Loading {source.location}")
        self._extra_shards = extra_shards
        self._share: ShareMode = share
        self._sharing: Sharing | None = None
        self._pipeline: Pipeline | None = None
        self._tensors: Iterator[tuple[str, Any]] | None = None
        self._began = 0.0
        self._ending = False
        self._closed = False
        self.model: ModelDirectory | None = None
        self.plan: LoadPlan | None = None
        self.report = LoadReport(source.location)

    # --- lifetime ---------------------------------------------------------------------------

    def open(self) -> LoadPlan:
        """Reads and checks names, index and headers; no payload. Done twice it does nothing."""
        if self.plan is not None:
            return self.plan
        if self._ending:
            raise Closed("this load was closed")
        try:
            self.model = ModelDirectory.open(
                self._source, only=self._only, extra_shards=self._extra_shards
            )
            self.plan = self._planned(self.model)
        except BaseException:
            self.close()
            raise
        return self.plan

    def _planned(self, model: ModelDirectory) -> LoadPlan:
        wanted = self._filter or (lambda name: True)
        files = [
            (shard.file, [tensor for tensor in shard.tensors if wanted(tensor.name)])
            for shard in model.shards
        ]
        shared = self._framework.takes_shared(self._source)
        self._sharing = Sharing(self._source, self._share if shared else "off")
        unit = self._sharing.piece_bytes or self._source.page_bytes
        plan = plan_load(files, grid=chunk_grid(self._chunk_bytes, unit))
        check_all(self._framework, plan.tensors)
        self._sharing.expect(plan)
        return plan

    def close(self) -> None:
        """Ends background reads, frees their memory, closes the source, and tells what was done.

        Every step may be repeated: where an interrupt comes in between, the next `close` (of a
        `with` block, or when the stream is dropped) goes on with what is left.
        """
        if self._closed:
            return
        self._ending = True
        try:
            if self._pipeline is not None:
                self._pipeline.close()
        finally:
            self._source.close()
        if self._pipeline is not None:
            self.report.seconds = time.perf_counter() - self._began
            _log.info("%s", self.report)
        self._closed = True
        self._progress.close()

    def __enter__(self) -> TensorStream:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # --- iteration --------------------------------------------------------------------------

    def __iter__(self) -> TensorStream:
        return self

    def __next__(self) -> tuple[str, Any]:
        if self._ending:
            raise StopIteration
        try:
            if self._tensors is None:
                plan = self.open()
                assert self._sharing is not None, "planning decides whether memory is shared"
                self._began = time.perf_counter()
                self._pipeline = Pipeline(
                    plan,
                    self._source,
                    self._framework,
                    in_flight=self._in_flight,
                    sharing=self._sharing,
                    owner=self,
                )
                self._tensors = _deliver(plan, self._pipeline, self._progress, self.report)
            return next(self._tensors)
        except BaseException:
            # The end of the tensors, too, comes as an exception.
            self.close()
            raise


def _deliver(
    plan: LoadPlan, pipeline: Pipeline, progress: Progress, report: LoadReport
) -> Iterator[tuple[str, Any]]:
    total = plan.tensor_bytes
    for index, chunk in enumerate(plan.chunks):
        asked = time.perf_counter()
        done = pipeline.wait_for(index)
        report.wait_seconds += time.perf_counter() - asked
        report.add(done.rungs, done.copy_seconds)
        for number in chunk.completes:
            info = plan.tensors[number].info
            report.tensors += 1
            report.tensor_bytes += info.nbytes
            progress.update(report.tensor_bytes, total)
            # No name for the tensor here: what the consumer drops must go at once.
            yield info.name, pipeline.take_tensor(number)
        pipeline.release()
    report.complete = True
