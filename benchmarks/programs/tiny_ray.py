"""The same tiny model under Ray Train, a worker on each of two nodes: ADDRESS FILE."""

import sys
import tempfile
from pathlib import Path

import ray  # pyright: ignore[reportMissingImports]  # installed only where it is measured
import ray.train  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

PROGRAMS = str(Path(__file__).parent)


def train(config: dict[str, str]) -> None:
    sys.path.insert(0, PROGRAMS)
    import tiny_ddp

    tiny_ddp.train(Path(config["out"]))


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="paceline-ray-") as folder:
        TorchTrainer(
            train,
            train_loop_config={"out": sys.argv[2]},
            scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()


if __name__ == "__main__":
    main()
