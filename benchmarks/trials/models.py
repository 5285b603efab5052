"""Models of libraries and of papers, small and randomly initialised, in the usual loop with a stepper."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.registry import Outcome, Rows, fit, program

SAMPLES, CLASSES, WORDS, LENGTH = 20, 5, 48, 8
BF16_LIMIT = 1e-3  # of losses of a model in bf16, a quarter of its rounding: split products are added in another order


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(size: int = 32, channels: int = 3) -> Rows:
    x = torch.randn(SAMPLES, channels, size, size, generator=generator())
    return Rows(x, torch.randint(CLASSES, (SAMPLES,), generator=generator(1)))


def sentences(*, classes: int | None = None) -> Rows:
    words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator())
    if classes is not None:
        return Rows(words, torch.randint(classes, (SAMPLES,), generator=generator(1)))
    return Rows(words, words.roll(-1, 1))


def vectors(width: int = 8) -> Rows:
    x = torch.randn(SAMPLES, width, generator=generator())
    return Rows(x, x.argmax(dim=1) % CLASSES)


def next_word(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


def sgd(worker: Any, model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return worker.prepare(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def adamw(worker: Any, model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return worker.prepare(torch.optim.AdamW(trained, lr=lr, eps=1e-6))


def library(name: str) -> Any:
    """A module of the extra `long`, which type checkers need not know."""
    return importlib.import_module(name)


def timm_model(name: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return library("timm").create_model(name, num_classes=CLASSES, **fields)


def tokens_first(config: Any, kind: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(config)


@program("perceptron with a skip connection")
def mlp(worker: Any) -> Outcome:
    torch.manual_seed(0)
    model = worker.prepare(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, CLASSES)))
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy, clip_norm=0.5)


@program("timm: a ViT, whose class token is expanded over the batch", needs="timm")
def timm_vit(worker: Any) -> Outcome:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4}
    model = worker.prepare(timm_model("vit_tiny_patch16_224", **sizes))
    return fit(worker, model, adamw(worker, model), pictures(), F.cross_entropy)


@program("timm: a ResNet with batch norm", needs="timm")
def timm_resnet(worker: Any) -> Outcome:
    model = worker.prepare(timm_model("resnet10t", layers=(1, 1, 1, 1)))
    return fit(worker, model, sgd(worker, model, 0.01), pictures(64), F.cross_entropy)


@program("timm: a Swin transformer, shifted windows with a table of relative positions", needs="timm")
def timm_swin(worker: Any) -> Outcome:
    sizes: dict[str, Any] = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    model = worker.prepare(timm_model("swin_tiny_patch4_window7_224", **sizes, drop_path_rate=0.0))
    return fit(worker, model, adamw(worker, model), pictures(), F.cross_entropy)


@program("timm: a ConvNeXt with layer scale", needs="timm")
def timm_convnext(worker: Any) -> Outcome:
    model = worker.prepare(timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)))
    return fit(worker, model, adamw(worker, model), pictures(), F.cross_entropy)


@program("transformers: GPT-2, tied embeddings", needs="transformers")
def gpt2(worker: Any) -> Outcome:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **drop)
    model = worker.prepare(tokens_first(config, GPT2LMHeadModel))
    return fit(worker, model, adamw(worker, model), sentences(), next_word, clip_norm=1.0)


@program("transformers: Llama, grouped keys, rotary positions", needs="transformers")
def llama(worker: Any) -> Outcome:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = worker.prepare(tokens_first(config, LlamaForCausalLM))
    return fit(worker, model, adamw(worker, model), sentences(), next_word)


@program("transformers: Mixtral, routed experts", needs="transformers")
def mixtral(worker: Any) -> Outcome:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    model = worker.prepare(tokens_first(config, MixtralForCausalLM))
    return fit(worker, model, adamw(worker, model), sentences(), next_word)


@program("transformers: BERT classifies sentences, with padding", needs="transformers")
def bert(worker: Any) -> Outcome:
    from transformers import BertConfig, BertForSequenceClassification

    drop: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": LENGTH, "num_labels": CLASSES}
    config = BertConfig(**sizes, **drop)
    model = worker.prepare(tokens_first(config, BertForSequenceClassification))
    data = sentences(classes=CLASSES)
    data.columns[0][::3, -3:] = 0

    def forward(model: nn.Module, micro: Any) -> Tensor:
        words, target = micro
        return F.cross_entropy(model(words, attention_mask=(words != 0).long()).logits, target)

    return fit(worker, model, adamw(worker, model), data, forward=forward)


@program("transformers: T5, an encoder and a decoder; loss as a sum over tokens and their number", needs="transformers")
def t5(worker: Any) -> Outcome:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    sizes |= {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = T5Config(**sizes, dropout_rate=0.0)
    model = worker.prepare(tokens_first(config, T5ForConditionalGeneration))
    data = sentences()
    data.columns[1][::4, -2:] = -100

    def forward(model: nn.Module, micro: Any) -> tuple[Tensor, Tensor]:
        words, target = micro
        logits = model(input_ids=words, labels=target.clamp(min=0)).logits
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100)
        return total, (target != -100).sum()

    return fit(worker, model, adamw(worker, model), data, forward=forward)


@program(
    "transformers: CLIP, two towers, a 0-d parameter, each picture against its own micro-batch", needs="transformers"
)
def clip(worker: Any) -> Outcome:
    from transformers import CLIPConfig, CLIPModel

    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "projection_dim": 16}
    config = CLIPConfig(
        text_config={**tower, "num_attention_heads": 4, "vocab_size": WORDS, "max_position_embeddings": LENGTH},
        vision_config={**tower, "num_attention_heads": 4, "image_size": 32, "patch_size": 16},
        projection_dim=16,
    )
    data = Rows(pictures().columns[0], sentences().columns[0])
    sample = {"pixel_values": data.columns[0][:2], "input_ids": data.columns[1][:2], "return_loss": True}
    model = worker.prepare(tokens_first(config, CLIPModel), sample=sample)

    def forward(model: nn.Module, micro: Any) -> Tensor:
        return model(pixel_values=micro[0], input_ids=micro[1], return_loss=True).loss

    return fit(worker, model, adamw(worker, model), data, forward=forward)


@program("peft: LoRA on a frozen GPT-2", needs="peft")
def lora(worker: Any) -> Outcome:
    return _lora(worker, torch.float32)


@program("peft: LoRA in fp32 on a frozen GPT-2 in bf16", limit=BF16_LIMIT, needs="peft")
def lora_on_bf16(worker: Any) -> Outcome:
    return _lora(worker, torch.bfloat16)


def _lora(worker: Any, base: torch.dtype) -> Outcome:
    from transformers import GPT2Config, GPT2LMHeadModel

    peft = library("peft")
    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **drop)
    inner: Any = tokens_first(config, GPT2LMHeadModel).to(base)
    adapters = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0)
    adapted: Any = peft.get_peft_model(inner, adapters)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model = worker.prepare(adapted)
    return fit(worker, model, adamw(worker, model, 3e-2), sentences(), next_word)


@program("diffusers: a U-Net learns noise that comes with the samples", needs="diffusers")
def unet(worker: Any) -> Outcome:
    torch.manual_seed(0)
    inner = library("diffusers").UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    pixels, times = pictures(8, 1).columns[0], torch.randint(100, (SAMPLES,), generator=generator(2))
    noise = torch.randn(pixels.shape, generator=generator(3))
    model = worker.prepare(inner, sample=(pixels[:2], times[:2]))

    def forward(model: nn.Module, micro: Any) -> Tensor:
        picture, noise, time = micro
        return F.mse_loss(model(picture + noise, time).sample, noise)

    return fit(worker, model, adamw(worker, model), Rows(pixels, noise, times), forward=forward)


@program("torch_geometric: two graph convolutions over batches of graphs", needs="torch_geometric")
def graphs(worker: Any) -> Outcome:
    data, layers = library("torch_geometric.data"), library("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = layers.GCNConv(4, 16), layers.GCNConv(16, 16), nn.Linear(16, CLASSES)

        def forward(self, graph: Any) -> Tensor:
            x = F.relu(self.one(graph.x, graph.edge_index))
            return self.out(layers.global_mean_pool(F.relu(self.two(x, graph.edge_index)), graph.batch))

    class Graphs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, number: int) -> Any:
            chance, nodes = generator(number), 3 + number % 4
            edges = torch.randint(nodes, (2, 2 * nodes), generator=chance)
            return data.Data(
                x=torch.randn(nodes, 4, generator=chance), edge_index=edges, y=torch.tensor(number % CLASSES)
            )

    torch.manual_seed(0)
    samples = Graphs()
    model = worker.prepare(Net(), sample=(data.Batch.from_data_list([samples[0], samples[1]]),))
    return fit(
        worker,
        model,
        adamw(worker, model, 1e-2),
        samples,
        forward=lambda model, graph: F.cross_entropy(model(graph), graph.y),
        collate=data.Batch.from_data_list,
    )


@program("a bidirectional LSTM over packed sequences")
def packed_lstm(worker: Any) -> Outcome:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 16)
            self.inner = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
            self.out = nn.Linear(32, CLASSES)

        def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.words(words), lengths, batch_first=True, enforce_sorted=False
            )
            _, (last, _) = self.inner(packed)
            return self.out(torch.cat([last[0], last[1]], dim=1))

    words, target = sentences(classes=CLASSES).columns
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator(2))
    torch.manual_seed(0)
    model = worker.prepare(Net(), sample=(words[:2], lengths[:2]))
    return fit(
        worker,
        model,
        adamw(worker, model, 1e-2),
        Rows(words, lengths, target),
        forward=lambda model, micro: F.cross_entropy(model(micro[0], micro[1]), micro[2]),
    )


@program("nn.TransformerEncoder with nn.MultiheadAttention")
def torch_encoder(worker: Any) -> Outcome:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(32, WORDS)

        def forward(self, words: Tensor) -> Tensor:
            return self.out(self.inner(self.words(words)))

    torch.manual_seed(0)
    model = worker.prepare(Net())
    return fit(worker, model, adamw(worker, model), sentences(), next_word)


@program("an embedding bag, and heads for two tasks weighed by 0-d parameters")
def two_tasks(worker: Any) -> Outcome:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.one, self.two = nn.EmbeddingBag(WORDS, 16), nn.Linear(16, CLASSES), nn.Linear(16, 1)
            self.weigh_one, self.weigh_two = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

        def forward(self, words: Tensor, kind: Tensor, size: Tensor) -> Tensor:
            x = self.bag(words)
            one, two = F.cross_entropy(self.one(x), kind), F.mse_loss(self.two(x).squeeze(1), size)
            weighed = one * (-self.weigh_one).exp() + two * (-self.weigh_two).exp()
            return weighed + self.weigh_one + self.weigh_two

    words, kind = sentences(classes=CLASSES).columns
    data = Rows(words, kind, torch.randn(SAMPLES, generator=generator(2)))
    torch.manual_seed(0)
    model = worker.prepare(Net(), sample=tuple(column[:2] for column in data.columns))
    return fit(worker, model, adamw(worker, model, 1e-2), data, forward=lambda model, micro: model(*micro))
