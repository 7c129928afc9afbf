"""The files the demonstration leaves: a plain PyTorch model and a picture of the curves."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from stratagem._cluster.launch.fork_server import run_python
from stratagem._demo.clicks import WideAndDeep

__all__ = ["draw_curves", "predict_without_stratagem", "save_model"]

_PREDICT_LIMIT_S = 60.0


def save_model(model: nn.Module, path: Path) -> Path:
    """Write the model's state_dict as plain tensors."""
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, path)
    return path


def predict_without_stratagem(
    saved: Path, *, shape: tuple[int, int, int], ids: Tensor, dense: Tensor
) -> float:
    """One prediction, made by a Python process that cannot import Stratagem.

    The process gets the model's source, which is ordinary PyTorch, and the file; nothing else.
    """
    source = inspect.getsource(WideAndDeep)
    script = f"""
import json, sys
sys.modules["stratagem"] = None  # any attempt to import it would fail
import torch
from torch import Tensor, nn
{source}
categories, fields, dense = {shape!r}
model = WideAndDeep(num_categories=categories, num_fields=fields, num_dense=dense)
model.load_state_dict(torch.load({str(saved)!r}, weights_only=True))
model.eval()
with torch.no_grad():
    logit = model(torch.tensor({ids.tolist()!r}), torch.tensor({dense.tolist()!r}))
print(json.dumps(torch.sigmoid(logit).item()))
"""
    return float(json.loads(run_python(script, timeout_s=_PREDICT_LIMIT_S)))


def draw_curves(
    times_s: Sequence[float],
    losses: Sequence[float],
    marks: Sequence[tuple[float, str]],
    path: Path,
) -> Path | None:
    """Loss against time as a PNG, the marks as dashed lines; None where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(times_s, losses, color="0.8", linewidth=0.5, label="loss of each step")
    width = max(1, len(losses) // 100)
    smooth = [
        sum(losses[max(0, i - width) : i + 1]) / (i - max(0, i - width) + 1)
        for i in range(len(losses))
    ]
    axes.plot(times_s, smooth, color="tab:blue", label=f"mean of {width + 1} steps")
    for when, what in marks:
        axes.axvline(when, color="tab:red", linestyle="--", linewidth=1)
        axes.annotate(what, (when, max(smooth)), rotation=90, va="top", fontsize=7)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss (binary cross-entropy)")
    axes.set_title("Asynchronous training on a local cluster")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path
