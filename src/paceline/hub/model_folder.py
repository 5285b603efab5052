"""The folder on this disk that a user means: a path, a hub's id whose files are in the cache, or an address."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import environment
from paceline.errors import CheckpointError, PlanError
from paceline.hub.opened_files import can_read_opened
from paceline.parallel.absent_files import parts_are_kept
from paceline.storage.address import check_address, is_address, plain_path

if TYPE_CHECKING:
    from paceline.hub.part_copy import PartCopy

__all__ = ["cache_folder", "model_folder", "model_parts", "source_name"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


def model_folder(source: str | Path, *, revision: str | None, cache_dir: str | Path | None) -> Path:
    """Return the folder. Nothing is asked of a hub: its files must be in the cache (HF_HOME).

    Raises CheckpointError, StorageError, and PlanError for an address that cannot be used here.
    """
    address = _address(source, revision)
    if address is not None:
        from paceline.hub.host_copy import host_copy

        return host_copy(address, cache_folder(cache_dir))
    text, path = str(source), Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file: name the folder that has it, {path.parent}, with its config.json")
    if isinstance(source, Path) or not HUB_ID.fullmatch(text):
        raise CheckpointError(f"there is no folder {path} (looked in {Path.cwd()})")
    return _cached(text, revision, cache_dir)


def model_parts(source: str | Path, *, revision: str | None, cache_dir: str | Path | None) -> PartCopy | None:
    """Return the copy of an address of which pieces come as they are asked for; None for what is on this disk already,
    and where this process does not keep parts of its models alone. Raises what `model_folder` does."""
    address = _address(source, revision) if parts_are_kept() and can_read_opened() else None
    if address is None:
        return None
    from paceline.hub.part_copy import part_copy

    return part_copy(address, cache_folder(cache_dir))


def cache_folder(given: str | Path | None) -> Path:
    """Where this host keeps its copies."""
    return environment.cache_folder() if given is None else Path(given).expanduser()


def source_name(source: str | Path) -> str:
    """A folder, an id or an address as a text, as a script names it."""
    return _as_address(source) or str(source)


def _as_address(source: str | Path) -> str | None:
    return str(source) if is_address(str(source)) else plain_path(source)


def _address(source: str | Path, revision: str | None) -> str | None:
    address = _as_address(source)
    if address is not None and revision is not None:
        raise ValueError(f"revision={revision!r} is for a hub's id; {address} has no revisions: name the folder itself")
    return None if address is None else check_address(address, option="paceline.from_pretrained")


def _cached(name: str, revision: str | None, cache_dir: str | Path | None) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(
            f"there is no folder {name!r} here, and a hub's id is looked for by huggingface_hub, which this Python "
            "does not have: pip install huggingface_hub"
        )
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        place = cache_dir or hub.constants.HF_HUB_CACHE
        version = "" if revision is None else f" --revision {revision}"
        raise CheckpointError(
            f"{name!r} is no folder in {Path.cwd()}, and the hub's cache {place} does not have it"
            f"{'' if revision is None else f' at revision {revision!r}'}. Workers download nothing from hubs: run "
            f"`hf download {name}{version}` once on each host (or where all see the cache, with HF_HOME), or name a "
            "folder or an address"
        ) from None
    except errors.HFValidationError as error:
        raise PlanError(f"paceline.from_pretrained({name!r}): neither a folder nor a hub's id: {error}") from error
