"""`model.fit` of Keras 3 under MirroredStrategy: one process, all devices of the host."""

import os

import numpy as np
import tensorflow as tf

print(f"TF_CONFIG {os.environ.get('TF_CONFIG')}", flush=True)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=(480, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int64")
with strategy.scope():
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(2)]
    model = tf.keras.Sequential([tf.keras.Input((4,)), *layers])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=tf.keras.optimizers.SGD(0.5))
history = model.fit(x, y, batch_size=48, epochs=3, shuffle=False, verbose=0)
print("losses", *(f"{loss:.6f}" for loss in history.history["loss"]), flush=True)
