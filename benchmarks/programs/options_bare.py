"""The same in a bare loop of torch. DEVICE PRECISION RECOMPUTE COMPILE and the words of `options_work`."""

import functools
import sys

import torch
from options_work import MICROS, SAMPLES, OnDevice, adamw, model, next_byte_loss, samples
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

DEVICE, PRECISION, RECOMPUTE, COMPILE = sys.argv[1:5]
aten = torch.ops.aten
KEPT = [  # by "selective": products and attention
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device(DEVICE)
    data = samples()
    measured = OnDevice(device)
    net = model().to(device)
    if RECOMPUTE != "none":
        selected = {"context_fn": functools.partial(create_selective_checkpoint_contexts, KEPT)}
        options = selected if RECOMPUTE == "selective" else {}
        for block in net.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    if COMPILE == "true":
        net.compile()
    optim = adamw(net)
    half = torch.autocast(device.type, dtype=torch.bfloat16, enabled=PRECISION == "bf16")
    micros = iter(DataLoader(data, batch_size=SAMPLES, shuffle=True, pin_memory=device.type == "cuda"))
    for number, (x, y) in enumerate(micros):
        with half:
            loss = next_byte_loss(net(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)) / MICROS
        loss.backward()
        if (number + 1) % MICROS:
            continue
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        loss.item()  # for a log line, as every script has
        measured.step()
    measured.end()


if __name__ == "__main__":
    main()
