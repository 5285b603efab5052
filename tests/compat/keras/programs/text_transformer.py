"""Text classification with a block of a transformer: is a line of Python's own sources code, or prose?"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import argparse
import email.message
import inspect
import logging
import threading

import keras
import numpy as np
from keras import layers

LENGTH, WORDS, WIDTH = 40, 128, 32


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, inner, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
        self.inner = keras.Sequential([layers.Dense(inner, activation="relu"), layers.Dense(width)])
        self.norm_1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm_2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout_1 = layers.Dropout(rate)
        self.dropout_2 = layers.Dropout(rate)

    def call(self, inputs):
        seen = self.norm_1(inputs + self.dropout_1(self.attention(inputs, inputs)))
        return self.norm_2(seen + self.dropout_2(self.inner(seen)))


class TokenAndPosition(layers.Layer):
    def __init__(self, length, words, width, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(words, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x):
        return self.tokens(x) + self.positions(keras.ops.arange(0, x.shape[-1]))


def read_lines():
    lines, is_prose = [], []
    for module in (argparse, email.message, inspect, logging, threading):
        inside = False
        for line in inspect.getsource(module).splitlines():
            quotes = line.count('"""')
            if line.strip():
                lines.append([min(ord(one), WORDS - 1) for one in line.strip()[:LENGTH].ljust(LENGTH)])
                is_prose.append(inside or quotes > 0 or line.strip().startswith("#"))
            inside = inside != (quotes % 2 == 1)
    return np.array(lines), np.array(is_prose, dtype="int32")


keras.utils.set_random_seed(3)
x, y = read_lines()
order = np.random.default_rng(0).permutation(len(x))[:2000]
x, y = x[order], y[order]
inputs = layers.Input(shape=(LENGTH,))
hidden = TokenAndPosition(LENGTH, WORDS, WIDTH)(inputs)
hidden = TransformerBlock(WIDTH, 2, 32)(hidden)
hidden = layers.GlobalAveragePooling1D()(hidden)
hidden = layers.Dense(20, activation="relu")(layers.Dropout(0.1)(hidden))
outputs = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(hidden))
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x[:1600], y[:1600], batch_size=32, epochs=2, validation_data=(x[1600:], y[1600:]), verbose=2)
print("history", history.history)
print("test", model.evaluate(x[1600:], y[1600:], verbose=0))
