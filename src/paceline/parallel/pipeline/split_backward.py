"""Backward in two halves: gradients of a stage's inputs now, those of its weights later.

In the graph of a stage some nodes lie on a path from its outputs to its inputs. An edge that leaves these paths leads
to weights only. The first half follows the paths down to the inputs and saves the gradients that arrive at nodes with
such edges. The second half continues from there through the leaving edges: a matrix product then computes its weight's
gradient, and not its input's again.

Only edges that lead to matrices are deferred. Edges that lead to vectors alone (norms, biases) are done in the first
half, because their kernels compute all gradients at once. Gradients reach `parameter.grad` through autograd, so hooks
run as usual.

Source of the idea: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["SplitBackward"]


class SplitBackward:
    """The backward of one micro-batch through one stage."""

    def __init__(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Mapping[int, Tensor]) -> None:
        """`gradients` belong to `outputs`; `inputs` are leaves that require gradients, by number."""
        self._outputs, self._gradients, self._inputs = outputs, gradients, inputs
        self._deferred: dict[Node, list[GradientEdge]] = {}
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def do_inputs(self) -> dict[int, Tensor]:
        """Return the gradients of the inputs that have one; everything that is not deferred goes to the parameters."""
        outputs, gradients, inputs = self._outputs, self._gradients, self._inputs
        self._outputs, self._gradients, self._inputs = (), (), {}
        graph = _Graph(outputs, inputs.values()) if inputs else None
        # without inputs no other stage waits, so there is no reason to keep the graph
        if graph is None or graph.is_tangled:
            torch.autograd.backward(outputs, gradients)
            return {number: leaf.grad for number, leaf in inputs.items() if leaf.grad is not None}
        self._deferred = graph.edges_to_matrices()
        at_once = graph.other_edges(self._deferred)
        edges = [*(get_gradient_edge(leaf) for leaf in inputs.values()), *at_once]
        hooks = [node.register_prehook(self._noting(node)) for node in self._deferred]
        try:
            grads = torch.autograd.grad(outputs, edges, gradients, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        found: list[Tensor | None] = list(grads)  # torch's annotation omits that some may be unused
        _send_on(zip(at_once, found[len(inputs) :], strict=True))
        return {number: grad for number, grad in zip(inputs, found, strict=False) if grad is not None}

    def do_weights(self) -> None:
        """Add the deferred gradients to the parameters and free the graph."""
        while self._deferred:
            node, edges = self._deferred.popitem()
            arrived = self._arrived.pop(node, None)
            if arrived is None:  # no gradient came this way
                continue
            starts = [(GradientEdge(node, k), grad) for k, grad in enumerate(arrived) if grad is not None]
            found = torch.autograd.grad(
                [edge for edge, _ in starts], edges, [grad for _, grad in starts], allow_unused=True, retain_graph=True
            )
            _send_on(zip(edges, found, strict=True))

    def _noting(self, node: Node) -> Any:
        def note(gradients: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = gradients

        return note


def _send_on(gradients: Any) -> None:
    """Continue backward from edges down to the parameters."""
    there = [(edge, grad) for edge, grad in gradients if grad is not None]
    if there:
        starts, arriving = [edge for edge, _ in there], [grad for _, grad in there]
        torch.autograd.backward(starts, arriving, retain_graph=True)  # weights may be computed, and used again


class _Graph:
    """The graph between outputs and inputs, and the edges that leave the paths between them."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Any) -> None:
        self._ends = {get_gradient_edge(leaf).node for leaf in inputs}
        starts = [get_gradient_edge(output) for output in outputs]
        self._leads: dict[Node, bool] = {}  # whether a node leads to an input
        # whether a node that does not lead to an input leads to a parameter of two dims or more
        self._has_matrix: dict[Node, bool] = {}
        for node in self._after(edge.node for edge in starts):
            children = [child for child, _ in node.next_functions if child is not None]
            self._leads[node] = node in self._ends or any(self._leads[child] for child in children)
            self._has_matrix[node] = _is_matrix(node) or any(self._has_matrix[child] for child in children)
        # Edges that leave the paths, with the nodes that they leave; None for an output that is on no path.
        self._leaving: dict[tuple[Node, int], list[Node | None]] = {}
        for edge in starts:
            if not self._leads[edge.node]:
                self._leaving.setdefault((edge.node, edge.output_nr), []).append(None)
        for node, leads in self._leads.items():
            for child, number in node.next_functions if leads else ():
                if child is not None and not self._leads[child]:
                    self._leaving.setdefault((child, number), []).append(node)

        beside = {child for child, _ in self._leaving}
        below = (child for node in beside for child, _ in node.next_functions if child is not None)
        # An edge that leaves at one place and rejoins another: parts of its gradient would be counted twice.
        self.is_tangled = not beside.isdisjoint(self._after(below)) or any(
            type(node).__name__ == "CheckpointFunctionBackward"  # torch's reentrant one runs in a whole backward only
            for node in self._leads
        )

    def edges_to_matrices(self) -> dict[Node, list[GradientEdge]]:
        """Return the edges to defer, by the node that they leave. An edge that leaves two nodes is not deferred,
        because one node's saved gradient would be incomplete."""
        found: dict[Node, list[GradientEdge]] = {}
        single = [(edge, nodes[0]) for edge, nodes in self._leaving.items() if len(nodes) == 1]
        for edge, node in single:
            if node is not None and self._has_matrix[edge[0]]:
                found.setdefault(node, []).append(GradientEdge(*edge))
        for edge, node in single:  # a product's bias goes with its matrix
            if node in found and not self._has_matrix[edge[0]]:
                found[node].append(GradientEdge(*edge))
        return found

    def other_edges(self, deferred: Mapping[Node, Sequence[GradientEdge]]) -> list[GradientEdge]:
        """Return the leaving edges that are not deferred."""
        late = {(edge.node, edge.output_nr) for edges in deferred.values() for edge in edges}
        return [GradientEdge(node, number) for node, number in self._leaving if (node, number) not in late]

    def _after(self, starts: Any) -> list[Node]:
        """Return all nodes below `starts`, each after those that it leads to."""
        found: dict[Node, None] = {}
        waiting: list[tuple[Node, bool]] = [(node, False) for node in starts]
        entered: set[Node] = set()
        while waiting:
            node, below_done = waiting.pop()
            if below_done:
                found[node] = None
            elif node not in entered:
                entered.add(node)
                waiting.append((node, True))
                waiting += [(child, False) for child, _ in node.next_functions if child is not None]
        return list(found)


def _is_matrix(node: Node) -> bool:
    parameter = getattr(node, "variable", None)
    return isinstance(parameter, Tensor) and parameter.dim() >= 2
