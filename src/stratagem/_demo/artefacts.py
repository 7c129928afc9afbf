"""Files that the demonstration writes: a plain PyTorch model and a picture of the curves."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from stratagem._demo.clicks import WideAndDeep
from stratagem.errors import StartupError

_PREDICT_LIMIT_S = 120.0

Points = Sequence[tuple[float, float]]


def save_model(model: nn.Module, path: Path) -> Path:
    """Write the model's state_dict as plain tensors."""
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, path)
    return path


def predict_without_stratagem(
    saved: Path, *, sizes: dict[str, int], ids: Tensor, dense: Tensor
) -> float:
    """Return a prediction of a new Python process in which Stratagem cannot be imported.

    The process gets the model's source, which is ordinary PyTorch, and the file; nothing else.
    """
    source = inspect.getsource(WideAndDeep)
    script = f"""
import json, sys
sys.modules["stratagem"] = None  # any attempt to import it would fail
import torch
from torch import Tensor, nn
{source}
model = WideAndDeep(**{sizes!r})
model.load_state_dict(torch.load({str(saved)!r}, weights_only=True))
model.eval()
with torch.no_grad():
    logit = model(torch.tensor({ids.tolist()!r}), torch.tensor({dense.tolist()!r}))
print(json.dumps(torch.sigmoid(logit).item()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=_PREDICT_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise StartupError(
            f"the process without Stratagem ended with code {done.returncode}: {done.stderr[-2000:]}"
        )
    return float(json.loads(done.stdout))


def draw_curves(
    losses: Points, aucs: Points, *, best_auc: float, marks: Sequence[tuple[float, str]], path: Path
) -> Path | None:
    """Draw loss and AUC against time as a PNG; return None where matplotlib is missing.

    Args:
        losses: time in seconds and loss of each step.
        aucs: time in seconds and AUC of each evaluation.
        best_auc: the best AUC that any model can reach.
        marks: time in seconds and description of each event; listed in the legend.
        path: the file to write.
    """
    if importlib.util.find_spec("matplotlib") is None or not losses:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5))
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    times, values = zip(*losses, strict=True)
    upper.plot(times, values, color="0.8", linewidth=0.5, label="one step")
    width = max(1, len(values) // 100)
    totals = torch.tensor((0.0, *values), dtype=torch.float64).cumsum(0)
    if len(values) > width:
        means = (totals[width:] - totals[:-width]) / width
        upper.plot(times[width - 1 :], means, color="tab:blue", label=f"mean of {width} steps")
    upper.set_ylabel("loss (binary cross-entropy)")
    if aucs:
        times, values = zip(*aucs, strict=True)
        label = f"held-out rows (last: {values[-1]:.3f})"
        lower.plot(times, values, color="tab:green", marker=".", label=label)
    lower.axhline(best_auc, color="0.4", linewidth=1, label=f"best possible: {best_auc:.3f}")
    lower.set_ylabel("AUC")
    lower.set_xlabel("seconds of training")
    for axes in (upper, lower):
        for (when, what), style in zip(marks, ("--", ":", "-.", "--"), strict=False):
            caption = textwrap.fill(f"{when:.1f} s: {what}", 60) if axes is lower else None
            axes.axvline(when, color="tab:red", linestyle=style, linewidth=1, label=caption)
        axes.grid(alpha=0.3)
    # Legends are outside the axes, where they cover no curve.
    upper.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8, frameon=False)
    upper.set_title("Click-through model, asynchronous training", loc="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path
