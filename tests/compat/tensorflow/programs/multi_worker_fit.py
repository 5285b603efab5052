"""`model.fit` of Keras 2 (tf_keras) under MultiWorkerMirroredStrategy, with BackupAndRestore, as in the guide."""

import argparse
import os
import time

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--backup", default="", help="folder for BackupAndRestore; none: no backup")
parser.add_argument("--gate", default="", help="wait behind epoch 2 until this file is there")
options = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def moons():
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 960)
    kind = np.arange(960) % 2
    x = np.stack([np.cos(angle) + kind, np.where(kind, 0.5 - np.sin(angle), np.sin(angle))], axis=1)
    x = (x + rng.normal(0, 0.15, x.shape)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, kind.astype("int64"))).batch(48)
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return batches.with_options(sharding)


with strategy.scope():
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(32, activation="tanh", input_shape=(2,)), tf.keras.layers.Dense(2)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=tf.keras.optimizers.SGD(0.5))


def told(epoch, logs):
    print(f"epoch {epoch + 1} loss {logs['loss']:.6f}", flush=True)


def wait(epoch, logs=None):
    while options.gate and epoch == 2 and not os.path.exists(options.gate):
        time.sleep(0.1)


callbacks = [tf.keras.callbacks.LambdaCallback(on_epoch_begin=wait, on_epoch_end=told)]
if options.backup:
    callbacks.insert(0, tf.keras.callbacks.BackupAndRestore(options.backup))
model.fit(moons(), epochs=options.epochs, callbacks=callbacks, verbose=0)
