"""`model.fit` of Keras 3 under MultiWorkerMirroredStrategy, which TensorFlow 2.21 itself cannot do."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.zeros((96, 4), dtype="float32")
y = np.zeros(96, dtype="int64")
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(48)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer="sgd")
model.fit(batches, epochs=1, verbose=0)
