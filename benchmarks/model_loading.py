"""Time and memory from a folder of safetensors files to prepared parts, two workers, against the disk's own rate.

    python benchmarks/model_loading.py [--widths 512,1024,1536] [--layers 16] [--dtype auto] [--plans shard=2,stages=2]

A Llama of random numbers in bf16 is written in files of about a tenth each. Before each measurement the kernel is told
to forget them. "Disk" is a plain read of all files, one after the other, into the same 8 MiB. "Kept" is a plain read
by two processes at once of as much as a worker keeps, each into new memory: about the least that any program needs for
such parts on this machine. "Load" is the slowest worker's time for `paceline.from_pretrained` and `worker.prepare`,
with transformers imported before. The three are measured in turn, and each is the median of the rounds. "Peak" is what
a worker's resident memory had grown by at most, over its part and the largest tensor. It contains what a first model
of any size brings: the code that it runs, and what libraries keep. A model of about 4 MiB shows how much that is, and
the last column is without it. The last line of each plan is the slope between the first size and the last: what bytes
cost, without what each layer and each start costs. The first size is a hundredth of a model of 7 billion parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import mmap
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from driving.options import options_of

MIB = 1 << 20
SHARES = {
    "replicas": 1.0,
    "context": 1.0,
    "shard": 0.5,
    "stages": 0.5,
    "tensor": 0.5,
}  # of the model, that a worker keeps
WORDS, HEAD = 16000, 64
PIECE_BYTES = 8 << 20
IDLE_S = 4  # a virtual machine gives freed memory back to its host meanwhile, as it does while workers start
SMALL = 64  # width of the model that shows what a first model brings


def write_model(folder: Path, width: int, layers: int) -> tuple[int, int]:
    """Write the model layer by layer; returns the bytes of all tensors and of the largest."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    names, places, largest, total = dict(model.state_dict()), dict[str, str](), 0, 0
    limit = 2 * sum(one.numel() for one in names.values()) // 10
    part: dict[str, torch.Tensor] = {}
    for number, (name, empty) in enumerate(names.items(), 1):
        part[name] = torch.randn(empty.shape).mul_(0.02).bfloat16()
        total, largest = total + part[name].nbytes, max(largest, part[name].nbytes)
        if sum(one.nbytes for one in part.values()) >= limit or number == len(names):
            file = f"model-{number:05}.safetensors"
            save_file(part, folder / file, {"format": "pt"})
            places |= dict.fromkeys(part, file)
            part = {}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return total, largest


def forget(folder: Path) -> None:
    """Tell the kernel to forget the files' pages."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read_s(folder: Path) -> float:
    room, began = bytearray(PIECE_BYTES), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(room):
                pass
    return time.perf_counter() - began


def kept_read_s(folder: Path, share: float) -> float:
    """Two processes each read the first or the last `share` of every file, into memory of their own."""
    context = multiprocessing.get_context("spawn")
    begin, took = context.Barrier(2), context.Queue()
    readers = [context.Process(target=keep_read, args=(folder, share, number, begin, took)) for number in range(2)]
    for one in readers:
        one.start()
    try:
        return max(took.get(timeout=600) for _ in readers)
    finally:
        for one in readers:
            one.kill()
            one.join()


def keep_read(folder: Path, share: float, number: int, begin: Any, took: Any) -> None:
    kept: list[mmap.mmap] = []
    begin.wait(timeout=60)
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            size = int(path.stat().st_size * share)
            kept.append(mmap.mmap(-1, size))
            file.seek(number * (path.stat().st_size - size))
            room, done = memoryview(kept[-1]), 0
            while done < size:
                if not (count := file.readinto(room[done : done + PIECE_BYTES])):
                    raise EOFError(path)
                done += count
            room.release()
    took.put(time.perf_counter() - began)


def memory_mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def loaded(worker: paceline.Worker, folder: str, dtype: str) -> list[tuple[float, float]]:
    """Of each worker: seconds, and MiB at the peak."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # what any program of transformers pays

    worker.gather(worker.rank)  # what comes with the first collective is there
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = memory_mib("VmRSS"), time.perf_counter()
    worker.prepare(paceline.from_pretrained(folder, dtype=dtype))
    took = time.perf_counter() - began
    return worker.gather((took, memory_mib("VmHWM") - before))


@dataclasses.dataclass(frozen=True, slots=True)
class Loading:
    """Sizes in MiB."""

    plan: str
    total: float
    part: float
    largest: float
    disk_s: float
    kept_s: float
    took_s: float
    peak: float

    def row(self, brings: float) -> str:
        """`brings`: what a first model of any size takes."""
        allowed = self.part + self.largest
        return (
            f"| {self.plan} | {self.total:.0f} | {times_text(self.disk_s, self.kept_s, self.took_s)} | "
            f"{self.peak:.0f} | {self.peak / allowed:.2f} | {(self.peak - brings) / allowed:.2f} |"
        )


def times_text(disk_s: float, kept_s: float, took_s: float) -> str:
    return f"{disk_s:.2f} | {kept_s:.2f} | {took_s:.2f} | {took_s / disk_s:.2f} | {took_s / kept_s:.2f}"


def measure(folder: Path, plan: str, dtype: str, sizes: tuple[int, int], scratch: Path, num_rounds: int) -> Loading:
    share = SHARES[plan.partition("=")[0]]
    disk, kept, loads, peaks = list[float](), list[float](), list[float](), list[float]()
    for number in range(num_rounds):
        forget(folder)
        disk.append(plain_read_s(folder))
        forget(folder)
        time.sleep(IDLE_S)
        kept.append(kept_read_s(folder, share))
        forget(folder)
        took_s, peak = load(folder, plan, dtype, scratch / f"{plan}-{folder.name}-{number}")
        loads.append(took_s)
        peaks.append(peak)
    factor = 2 if dtype == "fp32" else 1  # the files have 16 bits
    total, largest = (size / MIB for size in sizes)
    disk_s, kept_s, took_s = (statistics.median(one) for one in (disk, kept, loads))
    return Loading(plan, total, share * total * factor, largest * factor, disk_s, kept_s, took_s, max(peaks))


def load(folder: Path, plan: str, dtype: str, run_dir: Path) -> tuple[float, float]:
    """Seconds, and MiB at the peak: those of the worst worker."""
    found: list[Any] = paceline.run(
        functools.partial(loaded, folder=str(folder), dtype=dtype),
        workers=2,
        plan=f"{plan}+batch(size=8,micro=2)",
        run_dir=str(run_dir),
        save_at_end=False,
        tensorboard=False,
        threads=1,
    )
    took_s, peak = (max(column) for column in zip(*found, strict=True))
    return took_s, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="512,1024,1536", help="of the models that are loaded, one after the other")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="auto", help="what from_pretrained is given: auto, fp32")
    parser.add_argument("--plans", default="replicas=2,shard=2,stages=2,tensor=2")
    parser.add_argument("--rounds", type=int, default=3)
    options = options_of(
        parser,
        takes="about ten minutes",
        quick={"layers": 4, "widths": "256,512", "plans": "shard=2,stages=2", "rounds": 1},
    )
    widths = [SMALL, *(int(one) for one in options.widths.split(","))]
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="paceline-loading-") as scratch:
        folders = {width: Path(scratch) / str(width) for width in widths}
        for folder in folders.values():
            folder.mkdir()
        sizes = {width: write_model(folder, width, options.layers) for width, folder in folders.items()}
        for plan in options.plans.split(","):
            small, *found = [
                measure(folders[one], plan, options.dtype, sizes[one], Path(scratch), options.rounds) for one in widths
            ]
            rows += [one.row(small.peak - small.part) for one in (small, *found)]
            first, last = found[0], found[-1]
            if (more := (last.total - first.total) / 1024) > 0:
                slopes = [(getattr(last, one) - getattr(first, one)) / more for one in ("disk_s", "kept_s", "took_s")]
                rows.append(f"| {plan}, each GiB more | 1024 | {times_text(*slopes)} | | | |")
    columns = ("plan", "MiB", "disk, s", "kept, s", "load, s", "load / disk", "load / kept", "peak, MiB")
    columns = (*columns, "peak / (part + the largest)", "without what a first model brings")
    print("\n|", *(f" {column} |" for column in columns), sep="")
    print(f"|---{'|---:' * (len(columns) - 1)}|", *rows, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
