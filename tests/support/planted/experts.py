"""Errors of expert parallel: the router's gradient, tokens that meet other experts, sums over the wrong workers."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.parallel.expert import apply as expert_apply
from planted.planting import PlantedError, took_effect, wrap
from planted.programs import mixture
from planted.reductions import scaled, unsummed

__all__ = ["ERRORS"]

ROUTED = ("model.blocks.?", "model.blocks.?.experts", "model.blocks.?.experts.*", "model.blocks.?.router")


def _router_gradient(_: Any) -> None:
    def make(before: Any) -> Any:
        def dispatch(apply: Any, tokens: Any, weights: Any, **kwargs: Any) -> Any:
            weights = weights * 1.0
            if weights.requires_grad:
                took_effect()
                weights.register_hook(lambda gradient: gradient * 0.5)
            return before(apply, tokens, weights, **kwargs)

        return dispatch

    wrap(expert_apply, "dispatch_tokens", make)


def _token_gradient(_: Any) -> None:
    def make(before: Any) -> Any:
        def dispatch(apply: Any, tokens: Any, weights: Any, **kwargs: Any) -> Any:
            took_effect()
            return before(apply, tokens.detach() + (tokens - tokens.detach()) * 0.5, weights, **kwargs)

        return dispatch

    wrap(expert_apply, "dispatch_tokens", make)


def _other_experts(_: Any) -> None:
    def make(before: Any) -> Any:
        def route(*args: Any, **kwargs: Any) -> Any:
            took_effect()
            found = before(*args, **kwargs)
            return dataclasses.replace(found, experts=found.experts.roll(1, 0))

        return route

    wrap(expert_apply, "route_of", make)


ERRORS: tuple[PlantedError, ...] = (
    PlantedError(
        what="wrong gradient of a router (transformers #48687)",
        plan="experts=2",
        plant=_router_gradient,
        expected=ROUTED,
        program=mixture,
    ),
    PlantedError(
        what="gradients of routed tokens are lost in part",
        plan="experts=2",
        plant=_token_gradient,
        expected=(*ROUTED, "model.blocks.?.norm"),
        program=mixture,
    ),
    PlantedError(
        what="tokens meet other experts",
        plan="experts=2",
        plant=_other_experts,
        expected=ROUTED,
        program=mixture,
    ),
    PlantedError(
        what="gradients of experts are divided once more",
        plan="experts=2",
        plant=scaled("model.blocks.1.experts.up", 0.5),
        expected=("model.blocks.1.experts",),
        program=mixture,
    ),
    PlantedError(
        what="a router's gradient is not summed over the workers",
        plan="experts=2",
        plant=unsummed("model.blocks.0.router.weight"),
        expected=("model.blocks.0.router",),
        program=mixture,
    ),
    PlantedError(
        what="gradients of experts are summed twice",
        plan="experts=2",
        plant=scaled("model.blocks.1.experts.down", 2.0),
        expected=("model.blocks.1.experts",),
        program=mixture,
    ),
)
