"""The models of the rows in TensorFlow, and their steps. Runs in the peer's environment only."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

from benchmarks import work


def mlp_variables(size: dict[str, Any], **options: Any) -> list[Any]:
    """Return the initial parameters of all sides, with transposed kernels for TensorFlow."""
    return [
        tf.Variable(value.T.copy() if value.ndim == 2 else value, **options)
        for value in work.mlp_parameters(size)
    ]


def mlp_loss(variables: list[Any], inputs: Any, labels: Any) -> Any:
    """Return the mean cross-entropy of one batch."""
    w1, b1, w2, b2 = variables
    hidden = tf.nn.relu(tf.matmul(inputs, w1) + b1)
    logits = tf.matmul(hidden, w2) + b2
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def apply_sgd(variable: Any, gradient: Any) -> None:
    """Apply the gradient with one fused kernel on the variable's device."""
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=work.MLP_LEARNING_RATE, delta=gradient
    )


def mlp_sgd(variables: list[Any], inputs: Any, labels: Any) -> Any:
    """Run one step; return the loss."""
    with tf.GradientTape() as tape:
        loss = mlp_loss(variables, inputs, labels)
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        apply_sgd(variable, gradient)
    return loss


def mlp_mean_loss(variables: list[Any], batches: work.Batches) -> float:
    """Return the mean loss over all batches with the current parameters."""
    now = [tf.convert_to_tensor(variable) for variable in variables]
    losses = [float(mlp_loss(now, x, y)) for x, y in zip(*batches, strict=True)]
    return sum(losses) / len(losses)


def _shards(size: dict[str, Any]) -> list[Any]:
    each = -(-size["rows"] // size["shards"])
    begins = range(0, size["rows"], each)
    if "start" in size:
        shapes = [(min(each, size["rows"] - begin), size["width"]) for begin in begins]
        return [tf.Variable(functools.partial(tf.fill, s, size["start"])) for s in shapes]
    rows = work.embedding_table(size)
    return [tf.Variable(rows[begin : begin + each]) for begin in begins]


class Table:
    """An embedding table in shards, a linear layer, and Adagrad's state for each variable."""

    def __init__(self, size: dict[str, Any], strategy: Any) -> None:
        self.size = size
        self.shards = _shards(size)
        self.table = ShardedVariable(self.shards)
        self.head = tf.Variable(work.embedding_head(size).T.copy())
        self.bias = tf.Variable(tf.zeros((1,)))
        self.sums = []
        for variable in [*self.shards, self.head, self.bias]:
            with strategy.extended.colocate_vars_with(variable):
                self.sums.append(tf.Variable(tf.zeros(variable.shape)))

    def loss(self, table: Any, head: Any, bias: Any, batch: tuple[Any, Any]) -> Any:
        """Return the mean logistic loss of one batch."""
        ids, labels = batch
        width = self.size["columns"] * self.size["width"]
        flat = tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, width])
        logits = tf.matmul(flat, head) + bias
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))

    def adagrad(self, ids: Any, labels: Any) -> None:
        """Run one step; gradients of equal ids are summed first, as in PyTorch."""
        with tf.GradientTape() as tape:
            loss = self.loss(self.table, self.head, self.bias, (ids, labels))
        variables = [*self.shards, self.head, self.bias]
        gradients = tape.gradient(loss, variables)
        options = {"lr": work.EMBEDDING_LEARNING_RATE, "epsilon": work.EMBEDDING_EPSILON}
        for variable, state, gradient in zip(variables, self.sums, gradients, strict=True):
            where = {"var": variable.handle, "accum": state.handle}
            if isinstance(gradient, tf.IndexedSlices):
                unique, place = tf.unique(gradient.indices)
                summed = tf.math.unsorted_segment_sum(gradient.values, place, tf.shape(unique)[0])
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    **where, **options, grad=summed, indices=unique
                )
            else:
                tf.raw_ops.ResourceApplyAdagradV2(**where, **options, grad=gradient)

    def mean_loss(self, batches: work.Batches) -> float:
        """Return the mean loss over all batches with the current parameters."""
        table = tf.concat([tf.convert_to_tensor(shard) for shard in self.shards], axis=0)
        head, bias = tf.convert_to_tensor(self.head), tf.convert_to_tensor(self.bias)
        losses = [
            float(self.loss(table, head, bias, batch)) for batch in zip(*batches, strict=True)
        ]
        return sum(losses) / len(losses)
