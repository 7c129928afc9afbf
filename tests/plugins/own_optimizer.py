"""A user's own optimizer; parameter servers import it by name."""

import math
import os
import re
import time
from collections import defaultdict, deque
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


def keep_lock(seconds):
    """Hold Python's lock for `seconds` of processor time or longer, in one call that comes after short ones only."""
    length, took = 16, 0.0
    while took < 0.02:
        length += 1
        took = time_of_match(length)
    time_of_match(length + math.ceil(math.log2(seconds / took)))


def time_of_match(length):
    """Return the processor time of a match, which holds the lock; one more letter doubles it."""
    began = time.thread_time()
    re.match("(a+)+$", "a" * length + "b")
    return time.thread_time() - began


class LockKeeper(torch.optim.Optimizer):
    """Plain descent; in one process, a step holds Python's lock for `seconds` without a break, as native code can.

    Not in the coordinator, which tries optimizers that it does not know: its pings would seem to take that long.
    """

    def __init__(self, params, lr=0.1, seconds=2.0, process=0):
        super().__init__(params, {"lr": lr, "seconds": seconds, "process": process})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if os.getpid() == group["process"]:
                keep_lock(group["seconds"])
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


class Clipping(torch.optim.Optimizer):
    """Plain descent whose gradients are clipped by their norm over all parameters, as timm's Lamb does it."""

    def __init__(self, params, lr=0.1, max_grad_norm=1.0):
        super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure=None):
        used = [
            one for group in self.param_groups for one in group["params"] if one.grad is not None
        ]
        if not used:
            return
        norm, factor = torch.stack([one.grad.norm() for one in used]).norm(), 1.0
        if self.defaults["max_grad_norm"] is not None:
            factor = (self.defaults["max_grad_norm"] / norm).clamp(max=1.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * factor, alpha=group["lr"])


class Sharing(torch.optim.Optimizer):
    """Descent by a rate that grows with the largest gradient any parameter has had (as D-Adaptation's does)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.largest = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.largest = max(self.largest, float(parameter.grad.abs().max()))
                    parameter.sub_(parameter.grad, alpha=group["lr"] * (1 + self.largest))


class TrustRatio(torch.optim.Optimizer):
    """Descent whose rate is the ratio of a parameter's norm to its gradient's, tensor by tensor (LARS)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm().clamp(min=1e-6)
                    parameter.sub_(parameter.grad * ratio, alpha=group["lr"])


class CountingGroups(torch.optim.Optimizer):
    """Descent whose rate falls with the number of steps, which a group counts, used or not (Adan, Lamb)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["step"])
                    self.state[parameter]["used"] = True


class Noisy(torch.optim.Optimizer):
    """Descent with noise: each parameter by itself, although all draw from one stream of random numbers."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    noise = torch.randn(parameter.shape) * group["lr"]
                    parameter.sub_(parameter.grad + noise, alpha=group["lr"])


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one that steps from where the loss is largest nearby (SAM)."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def _with_gradients(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for p in self._with_gradients()]).norm()
        for p in self._with_gradients():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in self._with_gradients():
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


class _Around(torch.optim.Optimizer):
    """An optimizer around a given one."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups


class SlowWeights(_Around):
    """Keeps a second copy of the weights from one step to the next (Lookahead)."""

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.clone()
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Uninitialised(SlowWeights):
    """The same without ``Optimizer.__init__``, as in the package torch_optimizer."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)


class WithoutDefaults(SlowWeights):
    """The same with neither ``Optimizer.__init__`` nor ``defaults``, as in the repository of Lookahead's authors."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups
        self.state = defaultdict(dict)


class Counting(_Around):
    """Counts its steps."""

    def __init__(self, inner):
        super().__init__(inner)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.inner.step()


class Needing(torch.optim.Optimizer):
    """An optimizer with an argument without default that is no setting."""

    def __init__(self, params, rule, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.rule = rule

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(self.rule(p.grad), alpha=-group["lr"])


class SeveralMomenta(torch.optim.Optimizer):
    """Keeps a dict of tensors for each parameter (AggMo)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momenta = self.state[p].setdefault("momenta", {})
                for beta in (0.5, 0.9):
                    momenta[beta] = momenta.get(beta, 0.0) * beta + p.grad
                    p.sub_(momenta[beta], alpha=group["lr"] / 2)


class Factored(torch.optim.Optimizer):
    """Keeps a list of tensors for each matrix, and nothing for vectors (SOAP, SM3)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2:
                    self.state[p].setdefault("factors", [torch.zeros(size) for size in p.shape])
                p.sub_(p.grad, alpha=group["lr"])


class Windowed(torch.optim.Optimizer):
    """Keeps the last gradients in a deque, from the third step on (AdaShift)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > 2:
                    state.setdefault("window", deque(maxlen=2)).append(p.grad.clone())
                p.sub_(p.grad, alpha=group["lr"])
