"""Small models of KerasHub, made from their configurations: `python keras_hub_models.py OUT` fits each."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import keras_hub
import numpy as np

from paceline.compat.keras import fit
from paceline.runs.open_worker import open_worker

NUM, LENGTH, WORDS = 24, 8, 40


def tokens() -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    x = rng.integers(1, WORDS, size=(NUM, LENGTH))
    mask = np.arange(LENGTH)[None] < rng.integers(3, LENGTH + 1, size=(NUM, 1))
    return {"token_ids": x * mask, "padding_mask": mask.astype("int32")}, x


def bert() -> tuple[Any, Any, Any]:
    """A text classifier."""
    x, ids = tokens()
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=WORDS, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32, max_sequence_length=LENGTH
    )
    model = keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=2)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, {**x, "segment_ids": np.zeros_like(ids)}, ids.sum(1) % 2


def gpt2() -> tuple[Any, Any, Any]:
    """A language model, whose embedding is its last layer, too."""
    x, ids = tokens()
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=WORDS, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32, max_sequence_length=LENGTH
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, weighted_metrics=["accuracy"])
    return model, x, np.roll(ids, -1, axis=1)


def gemma() -> tuple[Any, Any, Any]:
    """A language model of today: rotary positions, grouped queries, RMS norms."""
    x, ids = tokens()
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=4,
    )
    model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, weighted_metrics=["accuracy"])
    return model, x, np.roll(ids, -1, axis=1)


def resnet() -> tuple[Any, Any, Any]:
    """An image classifier with batch normalization."""
    rng = np.random.default_rng(1)
    images = rng.normal(size=(NUM, 16, 16, 3)).astype("float32")
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    )
    model = keras_hub.models.ResNetImageClassifier(backbone=backbone, num_classes=3)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, images, rng.integers(0, 3, size=NUM)


def main() -> None:
    [out] = sys.argv[1:]
    found: dict[str, Any] = {}
    for make in (bert, gpt2, gemma, resnet):
        keras.utils.set_random_seed(4)
        model, x, y = make()
        found[make.__name__] = fit(model, x, y, batch_size=8, epochs=2, verbose=0).history
    if open_worker().is_first:
        with open(out, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
