"""A worker as the keeper of the run's state: it saves checkpoints, goes on from them, and gives out whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from paceline.events import Note, Warned
from paceline.parallel.class_name import class_name
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.parts import WorkerParts
from paceline.worker.run_member import RunMember
from paceline.worker.state.whole_weights import WholeWeights, weights_path

__all__ = ["StatefulMember", "loop_of"]


class StatefulMember(RunMember):
    """The part of a `Worker` that knows the state of the run, and takes no steps."""

    def __init__(self, parts: WorkerParts, loop: TrainingLoop) -> None:
        super().__init__(parts)
        self._loop, self._files = loop, parts.files
        self._models, self._resumed = parts.models, parts.resumed
        self._weights = WholeWeights(
            parts.models, parts.prepared.registry, group=parts.place.group, axes=parts.place.axes
        )

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self._loop.step

    def save(self) -> None:
        """Save a checkpoint of the state after the last committed step; writing continues in the background.

        Each worker copies its part to memory before this returns. Raises RuntimeError inside a step, and in a loop
        without common steps (`ParameterServer(staleness=...)`, `drop`). Raises CheckpointError if the save before could
        not be written, and SyncError when a peer is missing.

        Example::

            worker.save()
        """
        self._collectives.require_together("worker.save()")
        self._parts.prepared.require_own_weights("worker.save()")
        if self.is_first and self._loop.mode.has_left:  # it writes; that another one has left does not change its state
            self._loop.mode.require_common_step("worker.save()")
        self._loop.save()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the whole weights of a prepared model on the first worker (`is_first`); on others an empty dict.

        Keys and shapes are those of the user's own model under every layout, and tensors are copies on the CPU. They
        are put together one by one: no other worker has more than its part and one whole tensor. All workers call it.

        Raises ValueError for a model that was not prepared, RuntimeError inside a step, and SyncError when a peer is
        missing.

        Example::

            weights = worker.state_dict(model)
            if worker.is_first:
                torch.save(weights, "model.pt")
        """
        self._require_prepared(model, "state_dict")
        self._collectives.require_together("worker.state_dict()")
        found: dict[str, Any] = {}

        def gather() -> None:
            nonlocal found
            with self._loop.mode.averaged():
                found = self._weights.state_dict(model)

        self._parts.executor.shards.close()
        self._place.recorder.begin("collecting weights", self.step)
        self._collectives.together(gather)
        return found

    def save_model(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write the whole weights of a prepared model as safetensors; the first worker writes, and all call it.

        `path`: a file that ends with .safetensors, or a folder, which gets `model.safetensors` (large models: several
        files and an index) and, for models of transformers, `config.json`: `from_pretrained(path)` reads it. Of a model
        of peft a folder gets its adapters alone, as `PeftModel.from_pretrained(base, path)` reads them. Either may be
        in object storage: "s3://bucket/model.safetensors". `model`: which one, where several are prepared.

        Weights have the names and shapes of the user's own model, under every layout, and are written tensor by tensor.
        A tied tensor is stored once. A file appears whole or not at all.

        Raises ValueError for a model that was not prepared and for other suffixes, CheckpointError, on all workers, if
        the file cannot be written, RuntimeError inside a step, and SyncError when a peer is missing.

        Example::

            worker.save_model("model.safetensors")
        """
        if model is None:
            if len(self._models) != 1:
                raise ValueError(
                    f"worker.save_model({str(path)!r}): {len(self._models)} models are prepared; say which one: "
                    "worker.save_model(path, model)"
                )
            [model] = self._models
        chosen, target = model, weights_path(path)
        self._require_prepared(chosen, "save_model")
        self._collectives.require_together("worker.save_model()")

        def save() -> list[str]:
            with self._loop.mode.averaged():
                return self._weights.save(chosen, target, step=self.step)

        self._parts.executor.shards.close()
        self._place.recorder.begin("collecting weights", self.step)
        left_out = self._collectives.together(save)
        if left_out and self.is_first:
            text = f"{path} lacks {', '.join(left_out)}: these are no tensors, and safetensors holds nothing else"
            self._files.emit(Warned(text=f"{text}. worker.state_dict(model) has them"))

    def restore(self, path: str | None = None) -> int:
        """Continue from a checkpoint and return its step (0: there is none).

        It is `path`, or the newest complete one of the run directory.

        Prepared objects are filled at once, others when they are prepared. A run directory with checkpoints is
        continued without this call. Each worker reads the parts that it needs, after a comparison with their checksums.
        Raises CheckpointError on all workers if files of `path` are damaged or do not fit, and RuntimeError after
        `worker.batches()`.

        Example::

            step = worker.restore()
            assert step == worker.step
        """
        if self._loop.streams:
            raise RuntimeError("worker.restore() must come before worker.batches()")
        if self._resumed.is_recalled:
            self._say(f"worker.restore() changes nothing: the run goes on from memory, after step {self.step}")
            return self.step
        self._resumed.open(path)
        self._resumed.refill()
        self._loop.begin_at(self._resumed.step)
        self._files.begin(self._resumed.origin())
        if self.step:
            self._files.emit(Note(text=f"restored step {self.step} ({self._resumed.source})"))
        return self.step

    def _require_prepared(self, model: nn.Module, method: str) -> None:
        if model not in self._models:
            raise ValueError(
                f"worker.{method}() got a {class_name(model)} that was not prepared: model = worker.prepare(model)"
            )

    def _say(self, text: str) -> None:
        if self.is_first:
            self._files.emit(Note(text=text))


def loop_of(member: StatefulMember) -> TrainingLoop:
    """Return the loop over steps beneath a worker, for programs of Paceline's own that take steps in another way."""
    return member._loop  # pyright: ignore[reportPrivateUsage]  # of this very module; no user is to find it public
