"""A classifier in a training loop of its own under MultiWorkerMirroredStrategy, as TensorFlow's guide to them
has it: a distributed dataset, a replica's step, gradients summed over replicas, checkpoints by CheckpointManager.
"""

import argparse

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--folder", default="", help="for checkpoints; none: none are saved")
options = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
BATCH = 48  # of all replicas


def data(context):
    """Two moons; each pipeline takes its share of each batch."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 960)
    kind = np.arange(960) % 2
    x = np.stack([np.cos(angle) + kind, np.where(kind, 0.5 - np.sin(angle), np.sin(angle))], axis=1)
    x = (x + rng.normal(0, 0.15, x.shape)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, kind.astype("int64")))
    batches = batches.shard(context.num_input_pipelines, context.input_pipeline_id)
    return batches.batch(context.get_per_replica_batch_size(BATCH))


class Model(tf.Module):
    def __init__(self):
        init = tf.random.stateless_normal
        self.w1 = tf.Variable(0.5 * init([2, 32], seed=[1, 2]))
        self.b1 = tf.Variable(tf.zeros([32]))
        self.w2 = tf.Variable(0.5 * init([32, 2], seed=[3, 4]))
        self.b2 = tf.Variable(tf.zeros([2]))

    def __call__(self, x):
        return tf.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


with strategy.scope():
    model = Model()
    epoch = tf.Variable(0, dtype=tf.int64)

checkpoint = tf.train.Checkpoint(model=model, epoch=epoch)
place = strategy.cluster_resolver
is_chief = place.task_type is None or (place.task_type, place.task_id) == ("worker", 0)
manager = None
if options.folder:
    folder = options.folder if is_chief else f"{options.folder}/worker_{place.task_id}"  # all save, one is kept
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    newest = tf.train.latest_checkpoint(options.folder)
    if newest:
        checkpoint.restore(newest)
        print(f"goes on after epoch {epoch.numpy()}", flush=True)


def replica_step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
        loss = tf.reduce_sum(losses) / BATCH
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.5 * gradient)
    return loss


@tf.function
def step(batch):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=(batch,)), axis=None)


batches = strategy.distribute_datasets_from_function(data)
while epoch.numpy() < options.epochs:
    losses = [float(step(batch)) for batch in batches]
    epoch.assign_add(1)
    print(f"epoch {epoch.numpy()} loss {np.mean(losses):.6f}", flush=True)
    if manager is not None:
        manager.save()
