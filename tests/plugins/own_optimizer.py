"""A user's own optimizer; parameter servers import it by name."""

import re
import time
from pathlib import Path

import torch

import stratagem


class SignDescent(torch.optim.Optimizer):
    """Each element moves by the learning rate against the sign of its smoothed gradient."""

    def __init__(self, params, lr=0.1, smooth=0.5):
        super().__init__(params, {"lr": lr, "smooth": smooth})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, group["smooth"])
                parameter.sub_(state["mean"].sign(), alpha=group["lr"])


class GradientKeeper(torch.optim.Optimizer):
    """Descent by this gradient and the last one; clips in place, and keeps the gradient itself."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
                (grad._values() if grad.is_sparse else grad).clamp_(-0.5, 0.5)
                last = self.state[parameter].get("last", grad)
                parameter.sub_(grad + last, alpha=group["lr"])
                self.state[parameter]["last"] = grad


class LockKeeper(torch.optim.Optimizer):
    """Plain descent; each step holds Python's lock for `seconds` without a break, as native code can."""

    def __init__(self, params, lr=0.1, seconds=2.0):
        super().__init__(params, {"lr": lr, "seconds": seconds})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            took, length = 0.0, 16
            while took < group["seconds"]:
                length += 1
                began = time.monotonic()
                re.match("(a+)+$", "a" * length + "b")
                took = time.monotonic() - began
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class Touchy(torch.optim.Optimizer):
    """Takes no more groups on a worker while the file `refuses` exists."""

    def __init__(self, params, lr=0.1, refuses=""):
        super().__init__(params, {"lr": lr, "refuses": refuses})

    def add_param_group(self, param_group):
        if self.param_groups and on_a_worker() and Path(self.defaults["refuses"]).exists():
            raise OSError("no group is taken here")
        super().add_param_group(param_group)


def on_a_worker():
    try:
        stratagem.get_current_worker_index()
    except RuntimeError:
        return False
    return True


class Stubborn(torch.optim.Optimizer):
    """Plain descent that goes a share of the way; the share is no setting of a group, the rate has no default."""

    def __init__(self, params, lr, *, keep=0.5):
        super().__init__(params, {"lr": lr})
        self.share = 1 - keep

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.share * group["lr"])
