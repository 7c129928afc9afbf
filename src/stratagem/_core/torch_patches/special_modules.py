"""Modules of torch.nn that keep tensors outside ``_parameters``, or write parameters in forward.

Such a module, when its parameters get a home, becomes an instance of a subclass made here on the fly (as
``torch.nn.utils.parametrize`` does), with the same name. It pickles as its plain class, so that a saved
model loads without us. The cases:

- recurrent modules keep ``_flat_weights``, a list that C++ reads: here it is made from the context's
  parameters at each call;
- lazy modules create their parameters at first call: here the replicas meet and it is done once;
- Embedding and EmbeddingBag with ``max_norm`` write their weight in forward: here one at a time;
- modules with the old-style weight_norm or spectral_norm put a computed ``weight`` on themselves in a
  forward hook: here each replica has its own;
- SyncBatchNorm takes the statistics of the whole batch: here over the replicas (`sync_norm`).
"""

from __future__ import annotations

import copy
import copyreg
import threading
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from stratagem._core import sync_norm
from stratagem._core.context import current_replica
from stratagem._core.managed import ManagedParameter
from stratagem._core.replicated_parameters import ReplicatedParameter
from stratagem._core.torch_patches.compiling import eagerly

_COMPUTED = ("_g", "_v", "_orig")  # what old-style weight_norm and spectral_norm register


def prepare(module: Any, managed: ManagedParameter, name: str = "") -> None:
    """Make ``module`` one of the special ones, if it is of a kind that needs it."""
    mixin: type[_Special]
    central: Any = managed.central
    if isinstance(module, _Special):
        return
    if isinstance(module, nn.SyncBatchNorm):
        prepare_for_buffers(module)
        return
    if isinstance(module, nn.RNNBase):
        mixin = _Recurrent
    elif isinstance(module, LazyModuleMixin) and is_lazy(central):
        mixin = _Lazy
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        mixin = _Renormalising
    elif name.endswith(_COMPUTED) and type(module).__module__.startswith("torch.nn"):
        mixin = _Computing
    else:
        return
    if mixin is _Renormalising and isinstance(managed, ReplicatedParameter):
        managed.may_be_written = True
    module.__class__ = _special_class(type(module), mixin)


def prepare_for_buffers(module: Any) -> None:
    """The same for a module that may have a home for its buffers alone."""
    plain: type[nn.Module] = type(module)
    if issubclass(plain, nn.SyncBatchNorm) and not issubclass(plain, _Special):
        module.__class__ = _special_class(plain, _Synchronised)


_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _special_class(plain: type[nn.Module], mixin: type[_Special]) -> type[nn.Module]:
    found = _CLASSES.get((plain, mixin))
    if found is None:
        marks = ("__module__", "__qualname__", "__doc__")
        content = {mark: getattr(plain, mark) for mark in marks}
        found = type(plain.__name__, (mixin, plain), {**content, "_plain_class": plain})
        _CLASSES[plain, mixin] = found
    return found


class _Special(nn.Module):
    """What the special classes share: pickled they are plain, deep-copied they stay special."""

    _plain_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle insists that copyreg.__newobj__ makes the object's own class; this one does not.
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
    """RNN, LSTM, GRU: the list of weights is the context's."""

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
    """Lazy modules: initialised once, at the first call, by what the first replica was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        this: Any = self
        replica = current_replica()
        if replica is not None and replica.group.size > 1:

            def initialise(brought: list[Any]) -> list[Any]:
                first_args, first_kwargs = next(each for each in brought if each is not None)
                this._infer_parameters(this, first_args, first_kwargs)
                return [None] * len(brought)

            # On the caller's thread: its random numbers are those of plain PyTorch.
            replica.group.meet(
                replica.id, "a lazy module's first call", (args, kwargs), initialise, on_caller=True
            )
        else:
            this._infer_parameters(this, args, kwargs)
        # It is an ordinary module now: its class, and with it __call__, has changed.
        return self(*args, **kwargs)


class _Renormalising(_Special):
    """Embeddings with max_norm: rows are rescaled in place before they are looked up."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain class, one replica at a time, so that no row is rescaled twice at once."""
        if current_replica() is None:
            return super().forward(*args, **kwargs)
        with _RENORMALISING:
            return super().forward(*args, **kwargs)


# One for all: such modules are rare, and a lock on the module would not pickle.
_RENORMALISING = threading.Lock()


class _Computing(_Special):
    """Old-style weight_norm and spectral_norm: the computed weight is each replica's own."""

    def __setattr__(self, name: str, value: Any) -> None:
        replica = current_replica()
        if (
            replica is not None
            and isinstance(value, Tensor)
            and not isinstance(value, nn.Parameter)
        ):
            held = self.__dict__
            if name not in held["_parameters"] and name not in held["_buffers"]:
                replica.group.notes[id(self), replica.id, name] = value
                return
        super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        replica = current_replica()
        if replica is not None:
            computed = replica.group.notes.get((id(self), replica.id, name))
            if computed is not None:
                return computed
        return super().__getattribute__(name)


class _Synchronised(_Special):
    """SyncBatchNorm: in training, the statistics of all replicas' rows."""

    @eagerly
    def forward(self, input: Tensor) -> Tensor:
        """As the plain class; the replicas of a run meet instead of processes."""
        replica = current_replica()
        if replica is None or replica.group.size == 1 or not self.training:
            normalised: Tensor = super().forward(input)
            return normalised
        this: Any = self
        this._check_input_dim(input)
        this._check_non_zero_input_channels(input)
        return sync_norm.normalise(self, replica, input)
