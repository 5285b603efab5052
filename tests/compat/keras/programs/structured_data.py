"""Structured data: measured features and one in classes decide whether a tumour is benign."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_breast_cancer

keras.utils.set_random_seed(2)
data = load_breast_cancer()
order = np.random.default_rng(0).permutation(len(data.target))
measured, target = data.data[order].astype("float32"), data.target[order]
size = np.digitize(measured[:, 3], [400.0, 700.0, 1000.0])  # of the cells, in four classes
train, test = slice(0, 450), slice(450, None)

normalizer = layers.Normalization()
normalizer.adapt(measured[train])
numbers = keras.Input(shape=(30,), name="numbers")
classes = keras.Input(shape=(), name="size", dtype="int32")
features = layers.concatenate([normalizer(numbers), layers.Embedding(4, 3)(classes)])
hidden = layers.Dense(32, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3))(features)
output = layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model([numbers, classes], output)
model.compile(
    keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
)
history = model.fit(
    {"numbers": measured[train], "size": size[train]},
    target[train],
    validation_data=({"numbers": measured[test], "size": size[test]}, target[test]),
    batch_size=32,
    epochs=5,
    class_weight={0: 1.6, 1: 1.0},
    callbacks=[keras.callbacks.EarlyStopping(monitor="val_auc", mode="max", patience=2, restore_best_weights=True)],
    verbose=2,
)
print("history", history.history)
print("test", model.evaluate({"numbers": measured[test], "size": size[test]}, target[test], verbose=0))
