"""A loop under MultiWorkerMirroredStrategy that tells when its first step was done and what its steps took.

python tensorflow_loop.py OUT STEPS    the first worker writes the file OUT
"""

import json
import statistics
import sys
import time

import tensorflow as tf

out, steps = sys.argv[1], int(sys.argv[2])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable(tf.random.stateless_normal([512, 512], seed=[1, 2]))


def replica_step():
    x = tf.random.stateless_normal([256, 512], seed=[3, 4])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ weight)))
    (gradient,) = tape.gradient(loss, [weight])
    (gradient,) = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, [gradient])
    weight.assign_sub(1e-3 * gradient)
    return loss


@tf.function
def step():
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step), axis=None)


float(step())
first, took = time.time(), []
for _ in range(steps):
    began = time.perf_counter()
    float(step())
    took.append(time.perf_counter() - began)
if strategy.cluster_resolver.task_id == 0:
    with open(out, "w") as file:
        json.dump({"first": first, "step_s": statistics.median(took)}, file)
