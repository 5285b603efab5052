"""A classifier under ParameterServerStrategy, as TensorFlow's guide has it: workers and servers run a server for ever,
and the chief's ClusterCoordinator schedules steps on the workers and joins them at the end of each epoch.
"""

import argparse
import os
import time

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.0, help="seconds between two epochs")
options = parser.parse_args()

BATCH, STEPS = 48, 40

cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if cluster.task_type in ("worker", "ps"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"  # a chief is told of lost peers by its own calls
    server = tf.distribute.Server(
        cluster.cluster_spec(),
        job_name=cluster.task_type,
        task_index=cluster.task_id,
        protocol=cluster.rpc_layer or "grpc",
        start=True,
    )
    print(f"{cluster.task_type} {cluster.task_id} serves", flush=True)
    server.join()

strategy = tf.distribute.ParameterServerStrategy(
    cluster, variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=2)
)


def moons():
    """Two moons, without an end; each worker has its own order."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 960)
    kind = np.arange(960) % 2
    x = np.stack([np.cos(angle) + kind, np.where(kind, 0.5 - np.sin(angle), np.sin(angle))], axis=1)
    x = (x + rng.normal(0, 0.15, x.shape)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, kind.astype("int64"))).shuffle(960).repeat().batch(BATCH)


with strategy.scope():
    init = tf.random.stateless_normal
    weights = [tf.Variable(0.5 * init([2, 32], seed=[1, 2])), tf.Variable(tf.zeros([32]))]
    weights += [tf.Variable(0.5 * init([32, 2], seed=[3, 4])), tf.Variable(tf.zeros([2]))]


@tf.function
def step(batches):
    def replica_step(x, y):
        with tf.GradientTape() as tape:
            w1, b1, w2, b2 = (tf.convert_to_tensor(weight) for weight in weights)
            logits = tf.tanh(x @ w1 + b1) @ w2 + b2
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.2 * gradient)
        return loss

    return strategy.run(replica_step, args=next(batches))


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def worker_data():
    return strategy.distribute_datasets_from_function(lambda _: moons())


batches = iter(coordinator.create_per_worker_dataset(worker_data))
for epoch in range(options.epochs):
    losses = [coordinator.schedule(step, args=(batches,)) for _ in range(STEPS)]
    coordinator.join()
    print(f"epoch {epoch + 1} loss {np.mean([loss.fetch() for loss in losses]):.4f}", flush=True)
    time.sleep(options.pause)
