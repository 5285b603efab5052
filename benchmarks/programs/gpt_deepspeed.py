"""The example's GPT as a program of DeepSpeed, or of the package that stands for it: times each step.

gpt_deepspeed.py WIDTH LAYERS HEADS SAMPLES STAGE STEPS OUT PACKAGE
"""

import importlib
import sys
from pathlib import Path

import torch
from measured import Measured

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

ACCUMULATION = 2


def main() -> None:
    width, layers, heads, samples, stage, steps = map(int, sys.argv[1:7])
    out, package = sys.argv[7:9]
    deepspeed = importlib.import_module(package)
    torch.set_num_threads(1)
    if package == "deepspeed":
        deepspeed.init_distributed(dist_backend="gloo")
    from gpt import GPT, next_byte_loss, standard_library, windows

    measured = Measured()
    torch.manual_seed(0)
    text, _ = standard_library()
    model = GPT(width, layers, heads)
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 100}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=windows(text, 20000), config=config
    )
    micros = iter(deepspeed.utils.RepeatingLoader(loader))
    for _ in range(steps):
        for _ in range(ACCUMULATION):
            x, y = next(micros)
            loss = next_byte_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            loss.item()
        measured.step()
    measured.write(out, engine.global_rank)


if __name__ == "__main__":
    main()
