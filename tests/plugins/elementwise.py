"""Optimizers that treat each element alone, with options that change their state; for tests of shards and pieces."""

from __future__ import annotations

from typing import Any

ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "betas": (0.8, 0.9)}),
    ("Adadelta", {"lr": 0.5}),
    ("Adamax", {"lr": 0.1}),
    ("NAdam", {"lr": 0.1}),
    ("RAdam", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 2.0}),
    ("Rprop", {"lr": 0.1}),
]
