"""Modules of torch.nn that keep tensors outside ``_parameters``.

When a strategy takes over the parameters of such a module, the module becomes an instance of a subclass made here (as
``torch.nn.utils.parametrize`` does it), with the same name. It pickles as its plain class, so that a saved model loads
without Stratagem, and equals its plain class: programs ask ``type(module) == nn.GRU``. The cases:

- recurrent modules keep ``_flat_weights``, a list that C++ reads: it is made from the context's parameters at each call;
- lazy modules create their parameters at the first call: the replicas wait for each other and one creates them;
- old-style weight_norm, spectral_norm and pruning set a computed ``weight`` on the module in a forward hook: each
  replica has its own;
- embeddings with ``scale_grad_by_freq`` or ``max_norm`` need the ids of the whole batch: refused in replicas;
- SyncBatchNorm computes statistics of the whole batch: over the replicas.
"""

from __future__ import annotations

import copy
import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from typing_extensions import override

from stratagem._core import collectives
from stratagem._core.context import Replica, current_replica
from stratagem._core.managed import ManagedParameter
from stratagem._core.torch_patches.compiling import eagerly
from stratagem._core.torch_patches.private_api import buffers_of, parameters_of
from stratagem.errors import ReplicaError

_COMPUTED = ("_g", "_v", "_orig")  # name endings that weight_norm, spectral_norm and prune register


def prepare(module: Any, managed: ManagedParameter, name: str = "") -> None:
    """Change the class of ``module`` if it is one of the special kinds."""
    mixin: type[_Special]
    central: Any = managed.central
    if isinstance(module, _Special):
        return
    if isinstance(module, nn.SyncBatchNorm):
        mixin = _Synchronised
    elif isinstance(module, nn.RNNBase):
        mixin = _Recurrent
    elif isinstance(module, LazyModuleMixin) and is_lazy(central):
        mixin = _Lazy
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
        module.scale_grad_by_freq or module.max_norm is not None
    ):
        mixin = _OfWholeBatch
    elif name.endswith(_COMPUTED) and type(module).__module__.startswith("torch.nn"):
        mixin = _Computing
    else:
        return
    module.__class__ = _special_class(type(module), mixin)


def prepare_for_buffers(module: Any) -> None:
    """Change the class of a module whose buffers alone are managed."""
    plain: type[nn.Module] = type(module)
    if issubclass(plain, nn.SyncBatchNorm) and not issubclass(plain, _Special):
        module.__class__ = _special_class(plain, _Synchronised)


_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _special_class(plain: type[nn.Module], mixin: type[_Special]) -> type[nn.Module]:
    found = _CLASSES.get((plain, mixin))
    if found is None:
        content = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
        bases: tuple[type, ...] = (mixin, plain)
        if mixin is _Synchronised:
            # Below the user's class, whose own forward() may do more (timm's SyncBatchNormAct).
            own = () if plain is nn.SyncBatchNorm else (plain,)
            bases = (mixin, *own, _NormOverReplicas)
        kind = type("_EqualToPlain", (_EqualToPlain, type(plain)), {})
        found = kind(plain.__name__, bases, {**content, "_plain_class": plain})
        _CLASSES[plain, mixin] = found
    return found


class _EqualToPlain(type):
    """Class of the special classes: ``==``, ``in`` and lookups in a dict find the plain class."""

    _plain_class: type[nn.Module]

    @override
    def __eq__(cls, other: object) -> bool:
        return other is cls or getattr(other, "_plain_class", other) is cls._plain_class

    @override
    def __hash__(cls) -> int:
        return hash(cls._plain_class)


class _Special(nn.Module):
    """Base of the special classes: pickled as the plain class, deep-copied as the special one."""

    _plain_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle insists that copyreg.__newobj__ makes the object's own class; this function does not.
        state: Any = self
        maker = vars(copyreg)["_reconstructor"]
        return maker, (self._plain_class, object, None), state.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        this: Any = self
        twin: Any = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(this.__getstate__(), memo))
        return twin


class _Recurrent(_Special):
    """RNN, LSTM, GRU."""

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Any]:
        if current_replica() is None and "_flat_weights" in self.__dict__:
            plain: list[Any] = self.__dict__["_flat_weights"]
            return plain
        return [getattr(self, name, None) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Any]) -> None:
        if current_replica() is None:
            self.__dict__["_flat_weights"] = weights

    def _update_flat_weights(self) -> None:
        if current_replica() is None:
            plain: Any = super()  # the recurrent class this one is mixed into
            plain._update_flat_weights()


class _Lazy(_Special):
    """Lazy modules: initialised once, from the first replica's arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        this: Any = self
        replica = current_replica()
        if replica is not None and replica.group.size > 1:

            def initialise(brought: list[Any]) -> list[Any]:
                first_args, first_kwargs = next(each for each in brought if each is not None)
                this._infer_parameters(this, first_args, first_kwargs)
                return [None] * len(brought)

            # On the caller's thread, whose random numbers are those of plain PyTorch.
            label = "a lazy module's first call"
            replica.group.rendezvous(replica.id, label, (args, kwargs), initialise, on_caller=True)
        else:
            this._infer_parameters(this, args, kwargs)
        # The module is an ordinary one now: its class, and so __call__, has changed.
        return self(*args, **kwargs)


class _Computing(_Special):
    """Modules with a computed ``weight``: in a replica, tensors set as attributes are the replica's own."""

    def __setattr__(self, name: str, value: Any) -> None:
        replica = current_replica()
        computed = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if (
            replica is None
            or not computed
            or name in parameters_of(self)
            or name in buffers_of(self)
        ):
            super().__setattr__(name, value)
        else:
            replica.group.shared[id(self), replica.id, name] = value

    def __getattribute__(self, name: str) -> Any:
        replica = current_replica()
        if replica is not None:
            computed = replica.group.shared.get((id(self), replica.id, name))
            if computed is not None:
                return computed
        return super().__getattribute__(name)


class _OfWholeBatch(_Special):
    """Embeddings that count or renormalise the ids of a batch, of which a replica has a part."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Look up rows as the plain class does, on one replica."""
        this: Any = self
        replica = current_replica()
        if replica is not None and replica.group.size > 1 and this.weight.requires_grad:
            kind = self._plain_class.__name__
            if this.scale_grad_by_freq:
                raise ReplicaError(
                    f"{kind}(scale_grad_by_freq=True) divides the gradient of a row by how often the batch has its id, and "
                    f"{replica!r} has a part of the batch. Leave the argument out, or use a strategy with one device."
                )
            raise ReplicaError(
                f"{kind}(max_norm={this.max_norm}) shortens the rows of the ids that it gets, and {replica!r} has a part of "
                "the batch. Leave the argument out, and shorten the rows once for all replicas after optimizer.step():\n"
                "    sg.get_replica_context().merge_call(lambda strategy: "
                f"embedding.weight.data.renorm_(2, 0, {this.max_norm}))\n"
                "or use a strategy with one device."
            )
        plain: Any = super()  # the embedding that this class is mixed into
        return plain.forward(*args, **kwargs)


class _Synchronised(_Special):
    """SyncBatchNorm and its subclasses; `_NormOverReplicas` is the second base of the special class."""


class _NormOverReplicas(nn.SyncBatchNorm):
    """SyncBatchNorm whose statistics in training are those of the rows of all replicas.

    torch's own class synchronises processes. Here the replicas exchange their statistics once per layer in forward
    and once in backward (``all_gather``), and each normalises with mean and variance of all rows, as one device does.
    Uneven batches and a replica with one row or none are allowed.

    Backward: replica j's loss depends on replica i's rows through the statistics. Replica i's gradients are later
    weighted by i's share of the rows (`gradients`), although they belong to j's loss. So replica i must receive

        sum over j of  (weight of j) * d loss j / d statistics,   divided by the weight of i

    with weights 1 under ``gradient_aggregation="sum"``.
    """

    @eagerly
    def forward(self, input: Tensor) -> Tensor:
        """Normalise as the plain class does, over replicas instead of processes."""
        replica = current_replica()
        if replica is None or replica.group.size == 1 or not self.training:
            normalised: Tensor = super().forward(input)
            return normalised
        this: Any = self
        this._check_input_dim(input)
        this._check_non_zero_input_channels(input)
        return _normalise(self, replica, input)


def _normalise(module: Any, replica: Replica, x: Tensor) -> Tensor:
    """Compute the training forward of a ``SyncBatchNorm`` in a replica of several."""
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean, variance, count = _statistics(replica, exact)
    if module.track_running_stats:
        _track(module, mean.detach(), variance.detach(), count)
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = (exact - mean.view(shape)) * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        y = y * module.weight.view(shape)
    if module.bias is not None:
        y = y + module.bias.view(shape)
    return y.to(x.dtype)


def _statistics(replica: Replica, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance per channel over all replicas' rows, and the number of values."""
    count = x.numel() // x.shape[1]
    if count:
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        own = torch.stack([mean, variance]).unsqueeze(0)
    else:
        own = x.sum() + x.new_zeros(1, 2, x.shape[1])  # part of the graph, as in other replicas
    weight = replica.group.row_weights[replica.id]
    if replica.strategy.gradient_aggregation == "sum":
        weight = float(weight > 0)
    parts, counts = collectives.all_gather(replica, (own, torch.tensor([count])), 0, weight=weight)
    total = int(counts.sum())
    if total <= 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{x.shape} in the whole batch"
        )
    share = (counts.to(parts) / total).view(-1, 1)
    whole = (parts[:, 0] * share).sum(0)
    spread = (parts[:, 0] - whole).square()
    return whole, ((parts[:, 1] + spread) * share).sum(0), total


@torch.no_grad()
def _track(module: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update running statistics as torch does; every replica writes the same to its copy."""
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # a cumulative average
        momentum = 1.0 / float(module.num_batches_tracked)
    kept: Tensor = module.running_mean
    kept.mul_(1 - momentum).add_(mean.to(kept.dtype), alpha=momentum)
    kept = module.running_var
    kept.mul_(1 - momentum).add_(variance.to(kept.dtype), alpha=momentum * count / (count - 1))
