"""`paceline export` from and to object storage: by files of this host in between."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from paceline.checkpoint.export import MAX_SHARD_BYTES, ExportForm, chosen_checkpoint, export_as
from paceline.checkpoint.reader import find
from paceline.checkpoint.remote.download import download, fetch_newest
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints, folder_of
from paceline.errors import CheckpointError
from paceline.storage.address import check_address, plain_path
from paceline.storage.exports import send_files
from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

__all__ = ["main_remote_export"]


def main_remote_export(
    source: Path,
    target: Path,
    *,
    is_huggingface: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    config: Path | None = None,
) -> int:
    """As `main_export`, where `source` (a run's or a checkpoint's address), `target` or both are addresses.

    Raises PlanError for addresses that cannot be used here.
    """
    size = max_shard_bytes or MAX_SHARD_BYTES
    form = ExportForm(is_huggingface=is_huggingface, dtype=dtype, max_shard_bytes=size, config=config)
    source_address, target_address = plain_path(source), plain_path(target)
    for address in (source_address, target_address):
        if address is not None:
            check_address(address, option="paceline export")
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-export-") as place:
            if source_address is not None:
                source = _downloaded(source_address, Path(place) / "source")
            if target_address is None:
                return export_as(source, target, form)
            local = Path(place) / target.name
            chosen = chosen_checkpoint(source)
            form.write(chosen, local)
            for written in send_files(local, target_address):
                print(f"{written}  from {source_address or source}")
            if (remark := form.remark(chosen, local)) is not None:
                print(remark)
    except (CheckpointError, StorageError, OSError) as error:
        print(f"paceline export: {error}", file=sys.stderr)
        return 1
    return 0


def _downloaded(address: str, folder: Path) -> Path:
    """Bring the newest checkpoint of a run, or the one that the address names, and return its path."""
    parent, _, name = address.rstrip("/").rpartition("/")
    is_one = name.startswith("step_") and name[5:].isdecimal()
    remote = RemoteCheckpoints(ObjectStore(parent if is_one else address))
    found = remote.look()
    if is_one:
        found = [one for one in found if folder_of(one.step) == name]
    for one in found if is_one else ():
        if one.problem is not None:
            raise CheckpointError(f"{address} cannot be used: {one.problem}")
        return download(folder, remote, one)
    fetch_newest(folder, remote, found=found, say=lambda text: print(text, file=sys.stderr))
    newest = find(folder).newest
    if newest is None:
        raise CheckpointError(f"{address} is neither a checkpoint nor a run with a complete one")
    return newest
