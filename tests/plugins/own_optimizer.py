"""An optimizer as a user might write one; parameter servers import it by name."""

import torch


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
