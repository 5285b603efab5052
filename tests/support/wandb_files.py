"""Reads what W&B has written offline: its records, in the framing of LevelDB's logs (blocks of 32 KiB)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, FILE_HEAD = 32768, 7
HEAD = struct.Struct("<IHB")  # checksum, length, type: 1 whole, 2 first, 3 middle, 4 last
WHOLE, LAST = 1, 4


def raw_records(path: Path) -> list[bytes]:
    data, at, parts, found = path.read_bytes(), FILE_HEAD, bytearray(), list[bytes]()
    while at + HEAD.size <= len(data):
        if BLOCK - at % BLOCK < HEAD.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(data, at)
        parts += data[at + HEAD.size : at + HEAD.size + length]
        at += HEAD.size + length
        if kind in (WHOLE, LAST):
            found.append(bytes(parts))
            parts.clear()
    return found


def offline_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """The configuration of an offline run's file, its rows with their `_step`, and its exit status."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    config, rows, exit_code = dict[str, Any](), list[dict[str, Any]](), -1
    for raw in raw_records(path):
        record = messages.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= {"_id": record.run.run_id, "_name": record.run.display_name}
        if kind in ("run", "config"):
            for item in (record.run.config if kind == "run" else record.config).update:
                config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        if kind == "history":
            row = {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
            rows.append({**row, "_step": record.history.step.num})
        if kind == "exit":
            exit_code = record.exit.exit_code
    return config, rows, exit_code
