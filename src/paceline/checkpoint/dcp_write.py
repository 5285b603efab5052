"""Writes tensors in torch's distributed-checkpoint format, in this process alone: no process group, no collective.

The order of calls is the one that `torch.distributed.checkpoint.StorageWriter` documents. `save` would make the same
calls, but warns where no process group exists. Importing this module imports torch.distributed.checkpoint, so only the
writer's thread does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["Storage", "write_tensors"]


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors into a directory, flushed to the disk; tied names point to the same bytes."""
    storage = Storage(directory, ties)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), storage.storage_meta(), True)
    storage.set_up_storage_writer(True)
    local = storage.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(storage.prepare_global_plan(plans)[0])
    storage.finish(metadata, [storage.write_data(plan, planner).wait()])


class Storage(FileSystemWriter):
    """torch's files, with tied tensors stored once."""

    def __init__(self, path: Path, ties: Mapping[str, str]) -> None:
        super().__init__(path)
        self._ties = ties

    def storage_meta(self) -> StorageMeta:
        # The directory will have another name when it is read: no path is better than a wrong one.
        return dataclasses.replace(super().storage_meta() or StorageMeta(), checkpoint_id=None)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for of_worker in results for result in of_worker]
        for tied, stored in self._ties.items():
            metadata.state_dict_metadata[tied] = metadata.state_dict_metadata[stored]
            metadata.planner_data[tied] = (tied,)
            written += [
                dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=tied))
                for result in written
                if result.index.fqn == stored
            ]
        super().finish(metadata, [written])
