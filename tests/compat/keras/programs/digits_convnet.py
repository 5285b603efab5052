"""A convolutional net that reads handwritten digits."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from keras import layers
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
data = load_digits()
images = (data.images / 16.0).astype("float32")[..., None]
labels = keras.utils.to_categorical(data.target, 10)
x_train, y_train, x_test, y_test = images[:1500], labels[:1500], images[1500:], labels[1500:]

model = keras.Sequential(
    [
        keras.Input(shape=(8, 8, 1)),
        layers.Conv2D(32, kernel_size=(3, 3), activation="relu", padding="same"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=64, epochs=4, validation_split=0.1, verbose=2)
print("history", history.history)
print("test", model.evaluate(x_test, y_test, verbose=0))
